"""IFD's first step, where it is asked for: a model that has learnt about 1,000 varied rows before it judges.

As in Cherry LLM's first version: the prompts' last hidden states are averaged and put into 100 clusters (K-means, random
state 0); of each cluster the rows whose prompt's perplexity lies between its quartiles are sorted by it and ten taken,
evenly spaced. The model trains on them for one epoch with the recipe's own settings, but for batches of at most 128 and a
warm-up of 3 %, as theirs: 1,000 rows would be two steps of a batch of 512. Shapes: N samples, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans

from ..files import read_json, write_json
from ..models import load_model, pad_token_id
from ..prepare import Prepared, extraction_dtype
from ..proxy import Room, cpu_threads_alike, run_batches
from ..run_log import read_lines
from ..shards import length_batches, shard_batches
from ..tokens import IGNORE_INDEX, TokenTable
from ..training import train
from .setting import Arrays, Cost, Setting, alone, in_all, in_shards, key_of, read_shards, seconds_of

_NUM_CLUSTERS, _ROWS_OF_EACH = 100, 10
_BATCH = 128  # at most: Cherry's own
VERSION = 1


class Prompts:
    """The samples of a token table up to their first answer, every token asked of the model."""

    def __init__(self, tokens: TokenTable):
        self.tokens, self.ids = tokens, tokens.ids
        first = [int(np.argmax(tokens.supervised[a:b])) for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)]
        self.num_tokens = np.maximum(np.array(first), 1)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Ids and labels int64 [T] of one prompt."""
        ids = self.tokens[row]["input_ids"][: self.num_tokens[row]]
        labels = ids.copy()
        labels[0] = IGNORE_INDEX
        return {"id": self.ids[row], "input_ids": ids, "labels": labels}


def train_model(setting: Setting) -> None:  # collective
    """Choose the rows and train on them, unless that is done."""
    folder, shard_key, shards = _places(setting)
    in_shards(folder / "prompts", shard_key, shards, lambda: _reader(setting), setting.ranks, "ifd")

    def chosen() -> list[int]:
        path = folder / "rows.json"  # chosen once: K-means in another version might choose others
        if not path.is_file():
            found = read_shards(folder / "prompts", shard_key, shards)
            write_json(path, varied_rows(found["mean_hidden"].astype(np.float64), found["loss"], setting.usable).tolist())
        return read_json(path)

    rows, world_size = np.array(setting.ranks.on_main(chosen)), setting.ranks.world_size
    recipe, samples = setting.recipe, setting.samples
    size = min(_BATCH, recipe.train.global_batch_size, len(rows)) // world_size * world_size
    changed: dict[str, Any] = {
        "epochs": 1, "global_batch_size": max(size, 1), "micro_batch_size": 1, "warmup_ratio": 0.03, "warmup_steps": None,
        "log_to": [], "diagnose_every": None, "milestone_every": None, "seed": 0,
    }
    recipe = alone(recipe, train=recipe.train.model_copy(update=changed))
    plan = setting.training_plan("pre-experience", rows)
    train(recipe, Prepared(samples.model_folder, samples.tokenizer, samples.tokens, plan), folder, setting.ranks)


def varied_rows(mean_hidden: np.ndarray, losses: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """About ten rows of each of 100 clusters of prompts, int64, sorted.

    Args:
        mean_hidden: float [N, H], of each prompt.
        losses: float [N], mean token loss of each prompt; its order is the perplexity's.
        usable: int64, rows that may be chosen.
    """
    k = min(_NUM_CLUSTERS, len(usable))
    labels = KMeans(k, random_state=0, n_init=1).fit_predict(mean_hidden[usable])
    out: list[int] = []
    for cluster in range(k):
        members = usable[labels == cluster]
        if not len(members):  # fewer different prompts than clusters
            continue
        low, high = np.quantile(losses[members], [0.25, 0.75])
        middle = members[(losses[members] >= low) & (losses[members] <= high)]
        middle = middle[np.argsort(losses[middle], kind="stable")]
        places = np.linspace(0, len(middle) - 1, min(_ROWS_OF_EACH, len(middle))).astype(int)
        out += middle[places].tolist()
    return np.array(sorted(set(out)))


def model_of(setting: Setting) -> Path:
    """The folder of the model that has learnt them."""
    return _places(setting)[0] / "model"


def cost(setting: Setting) -> Cost:
    """The pass over the prompts, and the training."""
    folder, _, shards = _places(setting)
    log = read_lines(folder / "log.jsonl")
    seen = sum(entry["num_samples"] for entry in log)
    seconds = in_all(seconds_of(folder / "prompts", len(shards), setting.ranks), sum(entry["seconds"] for entry in log))
    return Cost(forwards=len(setting.samples.tokens) + seen, backwards=seen, seconds=seconds)


def key(setting: Setting) -> str:
    """Hash of what decides the model."""
    recipe, provenance = setting.recipe, setting.samples.provenance
    train = recipe.train.model_dump(exclude={"seed", "epochs"})
    return key_of(provenance["tokens"], provenance["model"], train, str(extraction_dtype(recipe)), VERSION)


def _places(setting: Setting) -> tuple[Path, str, list[np.ndarray]]:
    number = key(setting)
    prompts = Prompts(setting.samples.tokens)
    batches = length_batches(prompts.num_tokens, setting.recipe.selection.tokens_per_batch)
    return setting.folder / "ifd" / f"experience-{number}", number, [np.concatenate(s) for s in shard_batches(batches)]


def _reader(setting: Setting) -> Callable[[np.ndarray], Arrays]:
    recipe, device, samples = setting.recipe, setting.ranks.device, setting.samples
    model = load_model(samples.model_folder, recipe.model, extraction_dtype(recipe), device).eval()
    prompts, room, pad_id = Prompts(samples.tokens), Room(), pad_token_id(samples.tokenizer)

    def compute(rows: np.ndarray) -> Arrays:
        hidden, losses = np.zeros((len(rows), 0), np.float16), np.zeros(len(rows), np.float32)
        place = {int(row): number for number, row in enumerate(rows)}
        batches = [rows[b] for b in length_batches(prompts.num_tokens[rows], recipe.selection.tokens_per_batch)]
        with cpu_threads_alike(recipe.selection.cpu_threads, device):
            for batch, (mean, loss) in run_batches(model, prompts, batches, pad_id, device, room, _means):
                at = [place[int(row)] for row in batch]
                hidden = hidden if hidden.shape[1] else np.zeros((len(rows), mean.shape[1]), np.float16)
                hidden[at], losses[at] = mean.half().cpu().numpy(), loss.cpu().numpy()
        return {"mean_hidden": hidden, "loss": losses}

    return compute


def _means(
    samples: torch.Tensor, hidden: torch.Tensor, losses: torch.Tensor, num_samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean hidden state [B, H] and mean token loss [B] over what was asked of each prompt."""
    counts = torch.bincount(samples, minlength=num_samples).clamp(min=1)
    sums = torch.zeros(num_samples, hidden.shape[1], device=hidden.device).index_add(0, samples, hidden.float())
    total = torch.zeros(num_samples, device=hidden.device).index_add(0, samples, losses.float())
    return sums / counts[:, None], total / counts
