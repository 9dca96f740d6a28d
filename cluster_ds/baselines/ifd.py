"""IFD, instruction-following difficulty: how much an instruction helps with its answer (Cherry LLM, arXiv 2308.12032).

    IFD(x) = s_c / s_d,   s_c: mean token loss of the answer behind its prompt, s_d: of the answer alone,

"alone" being what the template puts right before an answer (Alpaca's "### Response:", a chat's opening of the assistant's
turn) and the answer. Kept are the highest below 1. Where paper and code differ, or are silent, we chose:

- the paper's first step, a model that has learnt 1,000 varied rows, is an option (`baselines.ifd.pre_experience`): its
  authors' later code leaves it out, and CluSTER's comparison counts two forward passes;
- Superfiltering (arXiv 2402.00530) divides perplexities instead, `baselines.ifd.ratio: perplexity`: the same rows under 1 in
  another order;
- dropped are, as in the code, rows over 1, truncated rows, and rows whose answer alone has no token to predict. If fewer
  remain than the budget wants, the papers are silent: rows over 1 follow, the lowest first, then truncated ones, and the
  plan says so;
- answers are found by the mask of the loss, not by searching the text. Of several turns all answers count in both scores.
  Where nothing at all stands before an answer (template `plain`, no BOS), its first token is in s_c alone: no model is
  asked for it.

Cost: two forward passes over all samples. Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..models import load_model, pad_token_id
from ..plan import Plan
from ..prepare import extraction_dtype
from ..proxy import Room, Rows, cpu_threads_alike, run_batches
from ..sample_losses import summed_losses
from ..shards import length_batches, shard_batches
from ..templates import answer_opening
from ..tokens import IGNORE_INDEX, TokenTable
from . import experience
from .setting import Arrays, Budget, Cost, Setting, in_all, in_shards, key_of, read_shards, seconds_of

VERSION = 1


class AnswersAlone:
    """The samples of a token table without their prompts, as far as `proxy.run_batches` asks."""

    def __init__(self, tokens: TokenTable, opening: list[int], bos: int | None):
        self.tokens, self.opening, self.bos = tokens, opening, bos
        self.ids = tokens.ids
        starts = tokens.supervised[1:] & ~tokens.supervised[:-1]
        starts = np.concatenate([[tokens.supervised[0]], starts])
        starts[tokens.offsets[:-1]] = tokens.supervised[tokens.offsets[:-1]]
        per_row = (np.add.reduceat(x.astype(np.int64), tokens.offsets[:-1]) for x in (starts, tokens.supervised))
        num_answers, num_learnt = per_row
        first = tokens.input_ids[tokens.offsets[:-1]]
        self.has_bos = np.zeros(len(tokens), dtype=bool) if bos is None else first == bos
        self.num_tokens = num_learnt + num_answers * len(opening) + self.has_bos

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Ids and labels int64 [T] of one sample."""
        sample = self.tokens[row]
        learnt = sample["labels"] != IGNORE_INDEX
        ids: list[int] = [self.bos] if self.has_bos[row] and self.bos is not None else []
        labels = [IGNORE_INDEX] * len(ids)
        for place in np.flatnonzero(learnt):
            if place == 0 or not learnt[place - 1]:
                ids += self.opening
                labels += [IGNORE_INDEX] * len(self.opening)
            ids.append(int(sample["input_ids"][place]))
            labels.append(ids[-1])
        return {"id": sample["id"], "input_ids": np.array(ids), "labels": np.array(labels)}

    @property
    def num_predicted(self) -> np.ndarray:
        """Int64 [N], tokens of the answers that are asked of the model: none stands before a sample's first token."""
        begins = (self.num_tokens > 0) & (len(self.opening) == 0) & ~self.has_bos
        num_learnt = np.add.reduceat(self.tokens.supervised.astype(np.int64), self.tokens.offsets[:-1])
        return num_learnt - begins


def score(setting: Setting) -> None:  # collective
    """Both losses of every sample, in shards."""
    if setting.recipe.baselines.ifd.pre_experience:
        experience.train_model(setting)
    folder, key, shards = _places(setting)
    in_shards(folder, key, shards, lambda: _scorer(setting), setting.ranks, "ifd")


def select(setting: Setting, budget: Budget, seed: int) -> Plan:
    """The hardest samples that the instruction still helps with; `seed` changes nothing."""
    folder, _, shards = _places(setting)
    found = losses(setting)
    scores = ratios(found["conditioned"], found["direct"], setting.recipe.baselines.ifd.ratio)
    order, num_good = ranked(scores, is_truncated(setting), setting.usable)
    rows = budget.first_of(order, setting.base.num_tokens)
    cost = Cost(forwards=2 * len(scores), seconds=seconds_of(folder, len(shards), setting.ranks))
    if setting.recipe.baselines.ifd.pre_experience:
        more = experience.cost(setting)
        seconds = in_all(cost.seconds, more.seconds)
        cost = replace(cost, forwards=cost.forwards + more.forwards, backwards=more.backwards, seconds=seconds)
    facts = {"below 1": num_good, "filled up with others": max(0, len(rows) - num_good)}
    return setting.plan("ifd", rows, cost, {**setting.recipe.baselines.ifd.model_dump(), **facts})


def losses(setting: Setting) -> Arrays:
    """Mean token losses float64 [N], "conditioned" and "direct", from what `score` has left."""
    folder, key, shards = _places(setting)
    return {name: values.astype(np.float64) for name, values in read_shards(folder, key, shards).items()}


def ratios(conditioned: np.ndarray, direct: np.ndarray, kind: str) -> np.ndarray:
    """Float64 [N], IFD from mean token losses; NaN where the answer alone has no token to predict."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return conditioned / direct if kind == "loss" else np.exp(conditioned - direct)


def ranked(scores: np.ndarray, truncated: np.ndarray, usable: np.ndarray) -> tuple[np.ndarray, int]:
    """The usable rows int64, best first, and how many of them IFD itself would keep; ties in the order given."""
    s, cut = scores[usable], truncated[usable]
    unknown = ~np.isfinite(s)
    good = ~unknown & ~cut & (s <= 1)
    group = np.where(good, 0, np.where(unknown, 3, np.where(cut, 2, 1)))
    within = np.where(unknown, 0.0, np.where(group == 0, -s, s))
    return usable[np.lexsort((within, group))], int(good.sum())


def is_truncated(setting: Setting) -> np.ndarray:
    """Bool [N], samples that fill data.max_length and do not end with an end marker that is learnt."""
    tokens, tokenizer = setting.samples.tokens, setting.samples.tokenizer
    last = tokens.offsets[1:] - 1
    ended = np.isin(tokens.input_ids[last], tokenizer.all_special_ids) & tokens.supervised[last]
    return (tokens.num_tokens >= setting.recipe.data.max_length) & ~ended


def answers_alone(setting: Setting) -> AnswersAlone:
    """The answers behind what the recipe's template puts right before one."""
    tokenizer = setting.samples.tokenizer
    opening = answer_opening(setting.recipe.data.template, tokenizer)
    return AnswersAlone(setting.samples.tokens, opening, tokenizer.bos_token_id)


def _places(setting: Setting) -> tuple[Any, str, list[np.ndarray]]:
    """Folder, key and shards of the losses."""
    recipe, tokens = setting.recipe, setting.samples.tokens
    pre = recipe.baselines.ifd.pre_experience
    parts = (tokens.key, setting.samples.provenance["model"], str(extraction_dtype(recipe)), pre, VERSION)
    key = key_of(*parts, recipe.selection.tokens_per_batch, *([experience.key(setting)] if pre else []))
    shards = [np.concatenate(s) for s in shard_batches(length_batches(tokens.num_tokens, recipe.selection.tokens_per_batch))]
    return setting.folder / "ifd" / key, key, shards


def _scorer(setting: Setting) -> Callable[[np.ndarray], Arrays]:
    recipe, device = setting.recipe, setting.ranks.device
    folder = experience.model_of(setting) if recipe.baselines.ifd.pre_experience else setting.samples.model_folder
    model = load_model(folder, recipe.model, extraction_dtype(recipe), device).eval()
    alone, room, pad_id = answers_alone(setting), Room(), pad_token_id(setting.samples.tokenizer)
    num_predicted, size = alone.num_predicted, recipe.selection.tokens_per_batch

    def compute(rows: np.ndarray) -> Arrays:
        with cpu_threads_alike(recipe.selection.cpu_threads, device):
            conditioned = _mean_losses(
                model, setting.samples.tokens, rows, setting.samples.tokens.num_supervised, size, pad_id, device, room
            )
            direct = _mean_losses(model, alone, rows, num_predicted, size, pad_id, device, room)
        return {"conditioned": conditioned, "direct": direct}

    return compute


def _mean_losses(
    model: PreTrainedModel, table: Rows, rows: np.ndarray, counts: np.ndarray, tokens_per_batch: int, pad_id: int,
    device: torch.device, room: Room,
) -> np.ndarray:
    """Float32 [n], mean token losses of some rows; NaN where a row has none."""
    sums = np.zeros(len(counts))
    batches = [rows[batch] for batch in length_batches(table.num_tokens[rows], tokens_per_batch)]
    for batch, total in run_batches(model, table, batches, pad_id, device, room, summed_losses):
        sums[batch] = total.numpy()
    return np.where(counts[rows] > 0, sums[rows] / np.maximum(counts[rows], 1), np.nan).astype(np.float32)


