"""LESS: samples whose gradients agree with those of validation rows (Xia et al., arXiv 2402.04333).

1. Warm up: adapters learn a random part of the data for some epochs; weights, Adam's moments and the mean learning rate
   of each epoch are kept.
2. For each of these checkpoints and each sample z, alone and without dropout, the gradient g of its mean answer loss with
   respect to the adapters becomes what Adam would make of it,

       G = (b1 m + (1 - b1) g) / sqrt(b2 v + (1 - b2) g^2 + eps),

   is projected by a fixed matrix of +1 and -1 to D numbers and divided by its l2 norm.
3. The same for validation rows with the plain gradient.
4. score(z) = max over subtasks of the mean over that subtask's rows of sum over epochs of w_e <G_e(z), g_e>, where w_e
   are the epochs' mean learning rates, divided by their sum. The highest scores are kept.

Where the paper and its authors' code differ we follow the code: eps stands under the root, and there is no bias
correction. Ours: warm-up samples are at least one global batch, clipped as the recipe says; the projection's signs come
from a counter, so that the matrix is never held and is the same on every device; batch sizes are the recipe's unless
`baselines.less.global_batch_size` says 128, the authors'. Ranks hold whole models and share the samples, at any ZeRO
stage of the warm-up. Scores are made once for all seeds. Validation rows are never test rows. Shapes: N samples, P
adapter parameters, D dimensions, V validation rows, S subtasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import load_file, save_file

from ..building import build_training, schedule_of
from ..checkpoint import load_checkpoint, release
from ..ds_config import resolve_config
from ..engine import ClusterEngine
from ..files import commit_file, read_json, write_json
from ..lora import base_of, with_adapters
from ..models import load_model
from ..plan import Plan
from ..prepare import Prepared, extraction_dtype, prepare_tokens
from ..proxy import cpu_threads_alike, sample_loss
from ..recipe import Recipe
from ..records import content_of
from ..resuming import FREE_TO_CHANGE
from ..run_log import read_lines
from ..tokens import TokenTable
from ..training import train
from .projection import project
from .setting import (
    Arrays,
    Budget,
    Cost,
    Setting,
    alone,
    in_all,
    in_shards,
    key_of,
    read_shards,
    remove_training,
    seconds_of,
)

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8
_SEED = 0
_ROWS_OF_SHARD = 64
_FEATURE_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}  # of gradients that are projected together
VERSION = 1


def score(setting: Setting) -> None:  # collective
    """Warm up, then the features of all samples and validation rows at each checkpoint."""
    ranks, subtasks = setting.ranks, _subtasks(setting)
    setting.memo["less validation"] = key_of([[name, table.key, rows.tolist()] for name, (table, rows) in subtasks.items()])
    folder, key = _folder(setting), _key(setting)
    sizes = {name: len(rows) for name, (_, rows) in subtasks.items()}
    ranks.on_main(lambda: folder.mkdir(parents=True, exist_ok=True))
    ranks.on_main(lambda: write_json(folder / "validation.json", sizes))
    _warm_up(setting)
    samples, shards, owners = setting.samples.tokens, _shards(setting), _owners(subtasks)
    for epoch in range(setting.recipe.baselines.less.warmup_epochs):
        state = _snapshot(setting, epoch)

        def of_samples(state: Path = state) -> Callable[[np.ndarray], Arrays]:
            features = Gradients(setting, state)
            return lambda rows: {"features": features.of([(samples, int(row)) for row in rows], as_adam=True)}

        def of_validation(state: Path = state) -> Callable[[np.ndarray], Arrays]:
            features = Gradients(setting, state)
            return lambda rows: {"features": features.of([owners[row] for row in rows], as_adam=False)}

        in_shards(folder / f"epoch-{epoch}", key, shards, of_samples, ranks, f"less, epoch {epoch + 1}")
        in_shards(folder / f"validation-{epoch}", key, _validation_shards(sizes), of_validation, ranks, "less, validation")


def select(setting: Setting, budget: Budget, seed: int) -> Plan:
    """The samples with the highest influence; `seed` changes nothing."""
    less, folder = setting.recipe.baselines.less, _folder(setting)
    found, sizes, log = scores(setting), _validation_sizes(setting), read_lines(folder / "warm_up" / "log.jsonl")
    order = setting.usable[np.argsort(-found[setting.usable], kind="stable")]
    rows = budget.first_of(order, setting.base.num_tokens)
    seen = sum(entry["num_samples"] for entry in log)
    passes = seen + less.warmup_epochs * (len(found) + sum(sizes.values()))
    seconds: float | None = sum(entry["seconds"] for entry in log)
    for epoch in range(less.warmup_epochs):
        for name, shards in ((f"epoch-{epoch}", _shards(setting)), (f"validation-{epoch}", _validation_shards(sizes))):
            seconds = in_all(seconds, seconds_of(folder / name, len(shards), setting.ranks))
    facts = {**less.model_dump(exclude={"validation"}), "validation_rows": sizes}
    return setting.plan("less", rows, Cost(forwards=passes, backwards=passes, seconds=seconds), facts)


def scores(setting: Setting) -> np.ndarray:
    """Float64 [N], each sample's influence, from what `score` has left."""
    less, folder, key, sizes = setting.recipe.baselines.less, _folder(setting), _key(setting), _validation_sizes(setting)
    log = read_lines(folder / "warm_up" / "log.jsonl")
    rates = np.array([np.mean([e["lr"] for e in log if e["epoch"] == epoch]) for epoch in range(less.warmup_epochs)])
    totals = np.zeros((len(setting.base), len(sizes)))
    for epoch, weight in enumerate(rates / rates.sum()):
        features = read_shards(folder / f"epoch-{epoch}", key, _shards(setting))["features"]
        wanted = read_shards(folder / f"validation-{epoch}", key, _validation_shards(sizes))["features"].astype(np.float32)
        means = np.stack([wanted[rows].mean(axis=0) for rows in _rows_of(sizes)])
        totals += weight * influence(features, means)
    return totals.max(axis=1)


def influence(features: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Float64 [N, S], inner products of features [N, D] with the subtasks' mean features [S, D]."""
    return np.concatenate(
        [block.astype(np.float32) @ means.T for block in np.array_split(features, max(1, len(features) // 4096))]
    ).astype(np.float64)


def adam_feature(gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What Adam would make of a gradient [..., P], given its moments [P] before it."""
    return (_BETA1 * m + (1 - _BETA1) * gradient) / torch.sqrt(_BETA2 * v + (1 - _BETA2) * gradient**2 + _EPS)


class Gradients:
    """Projected gradients of samples with respect to the adapters of one checkpoint."""

    def __init__(self, setting: Setting, snapshot: Path):
        recipe, self.device = setting.recipe, setting.ranks.device
        self.less, self.cpu_threads = recipe.baselines.less, recipe.selection.cpu_threads
        base = load_model(setting.samples.model_folder, recipe.model, extraction_dtype(recipe), self.device)
        self.model = with_adapters(base, self.less.lora, _SEED).eval()
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        state = load_file(snapshot, device=str(self.device))
        for name, parameter in self.parameters.items():
            parameter.data.copy_(state[f"weight/{name}"])
        self.m, self.v = (torch.cat([state[f"{part}/{name}"].flatten() for name in self.parameters]) for part in "mv")

    def of(self, samples: list[tuple[TokenTable, int]], *, as_adam: bool) -> np.ndarray:
        """Float16 [n, D], unit vectors, of samples given as table and row."""
        size = max(1, min(32, _FEATURE_BYTES[self.device.type] // (4 * len(self.m) + 1)))
        out = []
        with cpu_threads_alike(self.cpu_threads, self.device):
            for first in range(0, len(samples), size):
                gradients = torch.stack([self.gradient(table, row) for table, row in samples[first : first + size]])
                if as_adam:
                    gradients = adam_feature(gradients, self.m, self.v)
                out.append(project(gradients, self.less.projection_dim, _SEED).half().cpu())
        return torch.cat(out).numpy()

    def gradient(self, table: TokenTable, row: int) -> torch.Tensor:
        """Float32 [P], of the mean answer loss of one sample.

        Raises:
            ValueError: if it is not finite.
        """
        loss = sample_loss(base_of(self.model), table, row)
        found = torch.autograd.grad(loss, list(self.parameters.values()))
        gradient = torch.cat([g.detach().float().flatten() for g in found])
        if not torch.isfinite(gradient).all():
            raise ValueError(f"LESS: the gradient of sample {table.ids[row]} is not finite: look at its text")
        return gradient


def warm_up_recipe(setting: Setting) -> tuple[Recipe, np.ndarray]:
    """How the adapters warm up, and on which rows int64."""
    recipe, less = setting.recipe, setting.recipe.baselines.less
    wanted = math.ceil(less.warmup_fraction * len(setting.usable))
    batch = min(less.global_batch_size or recipe.train.global_batch_size, len(setting.usable))
    rows = setting.shuffled(_SEED)[: max(wanted, batch)]
    steps = -(-len(rows) // batch)
    if steps * less.warmup_epochs < 2:
        raise ValueError(
            f"baselines.less: {less.warmup_epochs} epoch of {steps} step, whose learning rate is 0: raise warmup_epochs or "
            "warmup_fraction"
        )
    changed = {
        "epochs": less.warmup_epochs, "global_batch_size": batch, "optimizer": "adamw", "lr": less.lr, "weight_decay": 0.0,
        "betas": [_BETA1, _BETA2], "eps": _EPS, "schedule": "linear", "warmup_ratio": 0.03, "warmup_steps": None,
        "seed": _SEED, "checkpoint_every": steps, "milestone_every": steps, "keep_checkpoints": 1, "log_to": [],
        "diagnose_every": None,
    }
    model = recipe.model.model_copy(update={"lora": less.lora})
    return alone(recipe, model=model, train=recipe.train.model_copy(update=changed)), rows


def _warm_up(setting: Setting) -> None:  # collective
    """Train the adapters and keep each epoch's weights and moments, unless that is done."""
    epochs, ranks, folder = setting.recipe.baselines.less.warmup_epochs, setting.ranks, _folder(setting) / "warm_up"
    if ranks.on_main(lambda: all(_snapshot(setting, epoch).is_file() for epoch in range(epochs))):
        ranks.on_main(lambda: remove_training(folder))
        return
    recipe, rows = warm_up_recipe(setting)
    samples = setting.samples
    plan = setting.training_plan("less warm-up", rows)
    prepared = Prepared(samples.model_folder, samples.tokenizer, samples.tokens, plan)
    ranks.on_main(lambda: folder.mkdir(parents=True, exist_ok=True))
    train(recipe, prepared, folder, ranks)
    config = resolve_config(recipe.deepspeed.config, recipe.train, ranks.world_size)
    steps = schedule_of(recipe, plan).steps_per_epoch
    for epoch in range(epochs):
        engine, _ = build_training(recipe, prepared, config, ranks)
        load_checkpoint(engine, folder / "checkpoints", (epoch + 1) * steps, ranks)
        state = adam_state(engine)  # collective
        ranks.on_main(lambda state=state, epoch=epoch: _save(state, _snapshot(setting, epoch)))  # type: ignore[misc]
        release(engine)
    ranks.on_main(lambda: remove_training(folder))


def adam_state(engine: ClusterEngine) -> dict[str, torch.Tensor]:  # collective at stage 3
    """Float32 weights and Adam's moments of what is trained: "weight/NAME", "m/NAME", "v/NAME"."""
    inner, out = engine.engine, {}
    link = getattr(inner.optimizer, "_lazy_init_hp_params_optimizer_state", None)  # a load does not do it
    if link is not None:
        link()
    for name, parameter in inner.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if inner.optimizer is inner.basic_optimizer:
            state = inner.basic_optimizer.state[parameter]
            found = (parameter.data, state["exp_avg"], state["exp_avg_sq"])
        else:
            moments = (safe_get_full_optimizer_state(parameter, part) for part in ("exp_avg", "exp_avg_sq"))
            found = (safe_get_full_fp32_param(parameter), *moments)
        for part, tensor in zip(("weight", "m", "v"), found, strict=True):
            out[f"{part}/{name}"] = tensor.detach().float().cpu().clone()
    return out


def _save(state: dict[str, torch.Tensor], path: Path) -> None:
    with commit_file(path) as part:
        save_file(state, part)


def _subtasks(setting: Setting) -> dict[str, tuple[TokenTable, np.ndarray]]:  # collective
    """Validation rows int64 of each subtask, with their table.

    Raises:
        ValueError: if there are none.
    """
    recipe, less, found = setting.recipe, setting.recipe.baselines.less, {}
    for name, section in less.validation.items():
        update = {"held_out": section, "held_out_sources": {}, "max_samples": less.max_validation}
        changed = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update=update)})
        table = prepare_tokens(changed, setting.folder, setting.ranks, held_out=True)
        found[name] = (table, np.arange(len(table)))
    if not found and setting.validation is not None and setting.validation_rows is not None:
        table, sources = setting.validation, np.array(setting.validation.sources)
        for name in sorted(set(sources[setting.validation_rows])):
            found[name] = (table, setting.validation_rows[sources[setting.validation_rows] == name][: less.max_validation])
    test = _test_contents(setting)
    for name, (table, rows) in found.items():
        seen = [table.ids[row] for row in rows if content_of(table.ids[row]) in test]
        if seen:
            raise ValueError(
                f"baselines.less.validation.{name}: {len(seen)} of {len(rows)} rows are test rows of the held-out ones, "
                f"e.g. {seen[0]}: selecting by them would make the test losses worthless"
            )
    if not found:
        raise ValueError("less needs validation rows: name baselines.less.validation, or evaluate.held_out")
    return found


def _validation_sizes(setting: Setting) -> dict[str, int]:
    """Rows of each subtask, as `score` has noted them."""
    return read_json(_folder(setting) / "validation.json")


def _owners(subtasks: dict[str, tuple[TokenTable, np.ndarray]]) -> list[tuple[TokenTable, int]]:
    """Table and row of each of the V validation rows, subtask by subtask."""
    return [(table, int(row)) for table, rows in subtasks.values() for row in rows]


def _rows_of(sizes: dict[str, int]) -> list[np.ndarray]:
    """Int64, the numbers of each subtask's validation rows among all V."""
    ends = np.cumsum(list(sizes.values()))
    return [np.arange(end - size, end) for end, size in zip(ends, sizes.values(), strict=True)]


def _validation_shards(sizes: dict[str, int]) -> list[np.ndarray]:
    return [piece for rows in _rows_of(sizes) for piece in np.array_split(rows, -(-len(rows) // _ROWS_OF_SHARD))]


def _shards(setting: Setting) -> list[np.ndarray]:
    number = len(setting.samples.tokens)
    return np.array_split(np.arange(number), -(-number // _ROWS_OF_SHARD))


def _snapshot(setting: Setting, epoch: int) -> Path:
    return _folder(setting) / f"adapters-{epoch}.safetensors"


def _folder(setting: Setting) -> Path:
    return setting.folder / "less" / _key(setting)


def _key(setting: Setting) -> str:
    """Hash of everything that decides the features, up to the rounding of another number of ranks."""
    recipe, provenance = setting.recipe, setting.samples.provenance
    parts = (provenance["tokens"], provenance["model"], recipe.baselines.less.model_dump(exclude={"validation"}))
    train = warm_up_recipe(setting)[0].train.model_dump(exclude=FREE_TO_CHANGE)
    return key_of(*parts, setting.memo["less validation"], train, str(extraction_dtype(recipe)), VERSION)


def _test_contents(setting: Setting) -> set[str]:
    """What the held-out rows say that report and may not decide."""
    if setting.validation is None or setting.validation_rows is None:
        return set()
    decide = set(setting.validation_rows.tolist())
    return {content_of(name) for row, name in enumerate(setting.validation.ids) if row not in decide}
