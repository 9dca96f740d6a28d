"""S2L: samples of every kind of training trajectory of a small model (Yang et al., arXiv 2403.07384).

A small model learns all the data; at some steps the mean answer loss of every sample is noted, which makes a trajectory
[T] each. K-means puts the trajectories into 100 clusters, of which the small ones are taken whole and the others give
equal parts.

As the authors' code does it, quotas go over sources first, the smallest first: a source gets what is left divided by the
sources that are left, or all it has. Inside a source clusters are taken in ascending order of size (a comment there says
descending), those of one or two samples last. Losses that are not finite, or samples the small model's tokenizer loses,
count as 0. Ours: K-means is scikit-learn's on all trajectories (theirs fits on at most 256 K of them); snapshots are
spread evenly over the run; the small model packs its samples as the recipe does. Trajectories are made once, clusters and
draws for each seed. Shapes: N samples, T snapshots.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from sklearn.cluster import KMeans

from ..building import schedule_of
from ..files import commit_file
from ..models import load_tokenizer, model_folder, model_hash
from ..plan import Plan
from ..prepare import Prepared, prepare_tokens
from ..recipe import Recipe
from ..resuming import FREE_TO_CHANGE
from ..run_log import read_lines
from ..tokens import TokenTable
from ..training import train
from ..validation import losses_of_steps
from .setting import Budget, Cost, Setting, alone, key_of, nearest_in_tokens, remove_training

_SMALLEST = 2  # clusters of at most so many samples are drawn from last
VERSION = 1


def score(setting: Setting) -> None:  # collective
    """Train the small model and note the trajectories, unless that is done."""
    ranks, recipe = setting.ranks, small_recipe(setting.recipe)
    base = ranks.on_every_node(lambda: model_folder(recipe.model))
    setting.memo["small model"] = ranks.on_main(lambda: model_hash(base))
    folder = _folder(setting)
    path = folder / "trajectories.npy"
    if ranks.on_main(path.is_file):
        ranks.on_main(lambda: remove_training(folder))
        return
    tokens = prepare_tokens(recipe, setting.folder, ranks)
    plan = _everything(tokens, setting.memo["small model"])
    total = schedule_of(recipe, plan).num_steps
    every = math.ceil(total / recipe.baselines.s2l.snapshots)
    recipe = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"every": every})})
    ranks.on_main(lambda: folder.mkdir(parents=True, exist_ok=True))
    train(recipe, Prepared(base, load_tokenizer(base), tokens, plan), folder, ranks, held_out=tokens)

    def keep() -> None:
        steps = [entry["step"] for entry in read_lines(folder / "held_out.jsonl")]
        found = trajectories(losses_of_steps(folder, steps), tokens.ids, setting.base.ids)
        with commit_file(path) as part, part.open("wb") as file:
            np.save(file, found)
        remove_training(folder)

    ranks.on_main(keep)


def select(setting: Setting, budget: Budget, seed: int) -> Plan:
    """Equal parts of the kinds of trajectories."""
    folder, s2l = _folder(setting), setting.recipe.baselines.s2l
    found = np.load(folder / "trajectories.npy")
    usable, sources = setting.usable, np.array(setting.base.source or ["data"] * len(setting.base))
    groups = [usable[sources[usable] == name] for name in sorted(set(sources[usable]))]
    labels = np.zeros(len(setting.base), dtype=np.int64)
    for rows in groups:
        k = min(s2l.num_clusters, len(np.unique(found[rows], axis=0)))
        labels[rows] = KMeans(k, n_init=1, max_iter=20, random_state=seed).fit_predict(found[rows].astype(np.float64))

    def of(number: int) -> np.ndarray:
        rng = np.random.default_rng((seed, 4))
        sizes = ascending_quotas(np.array([len(rows) for rows in groups]), number)
        return np.concatenate([balanced(rows, labels[rows], size, rng) for rows, size in zip(groups, sizes, strict=True)])

    num_tokens = setting.base.num_tokens
    if budget.num_tokens is None:
        rows = of(budget.num_samples)
    else:
        rows = nearest_in_tokens(of, lambda rows: int(num_tokens[rows].sum()), 1, len(usable), budget.num_tokens)
    log, held_out = (read_lines(folder / name) for name in ("log.jsonl", "held_out.jsonl"))
    seen = sum(entry["num_samples"] for entry in log)
    looked = sum(entry["num_samples"] for entry in held_out)
    seconds = sum(entry["seconds"] for entry in [*log, *held_out])
    cost = Cost(small_forwards=seen + looked, small_backwards=seen, seconds=seconds)
    facts = {**s2l.model_dump(exclude={"model"}), "small_model": _small_model(setting), "snapshots_taken": found.shape[1]}
    return setting.plan("s2l", rows, cost, facts)


def trajectories(losses: np.ndarray, ids: list[str], wanted: list[str]) -> np.ndarray:
    """Float64 [N, T], the losses [T, n] of samples `ids` in the order of `wanted`; 0 where there is none."""
    place = {name: number for number, name in enumerate(ids)}
    found = np.array([place.get(name, -1) for name in wanted])
    out = np.where(found[:, None] >= 0, losses.T[found], np.nan)
    return np.where(np.isfinite(out), out, 0.0)


def ascending_quotas(sizes: np.ndarray, number: int) -> np.ndarray:
    """How many of each group, the smallest group first: an equal part of what is left, or all it has; int64."""
    quotas = np.zeros(len(sizes), dtype=np.int64)
    left = number
    for place, group in enumerate(np.argsort(sizes, kind="stable")):
        quotas[group] = min(int(sizes[group]), left // (len(sizes) - place))
        left -= int(quotas[group])
    return quotas


def balanced(rows: np.ndarray, labels: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """A number of rows, equal parts of the clusters, of each at random.

    Args:
        rows: int64 [n].
        labels: int64 [n], the cluster of each.
        number: at most n.
        rng: of the draws.
    """
    members = [rows[labels == cluster] for cluster in np.unique(labels)]
    large = sorted((m for m in members if len(m) > _SMALLEST), key=len)
    quotas = ascending_quotas(np.array([len(m) for m in large], dtype=np.int64), number)
    taken = [m if q == len(m) else rng.choice(m, q, replace=False) for m, q in zip(large, quotas, strict=True)]
    rest = number - int(quotas.sum())
    if rest:
        small = [m for m in members if len(m) <= _SMALLEST]
        pool = np.concatenate(small) if small else np.zeros(0, dtype=np.int64)
        taken.append(rng.choice(pool, min(rest, len(pool)), replace=False))
    out = np.concatenate(taken).astype(np.int64)
    if len(out) < number:  # the authors' code would keep fewer
        out = np.concatenate([out, rng.choice(np.setdiff1d(rows, out), number - len(out), replace=False)])
    return out


def small_recipe(recipe: Recipe) -> Recipe:
    """How the small model learns.

    Raises:
        ValueError: if the recipe names none.
    """
    s2l = recipe.baselines.s2l
    if s2l.model is None:
        raise ValueError("s2l needs a small model: name baselines.s2l.model (name_or_path)")
    changed = {
        "epochs": s2l.epochs, "lr": s2l.lr, "optimizer": "adamw", "schedule": "cosine", "warmup_ratio": 0.03,
        "warmup_steps": None, "weight_decay": 0.0, "seed": 0, "log_to": [], "diagnose_every": None,
        "milestone_every": None, "global_batch_size": s2l.global_batch_size or recipe.train.global_batch_size,
    }
    return alone(recipe, model=s2l.model, train=recipe.train.model_copy(update=changed))


def _everything(tokens: TokenTable, model: str) -> Plan:
    """All samples of the small model's tokens, in one cluster."""
    n = len(tokens)
    zeros = np.zeros(n, dtype=np.int32)
    return Plan(
        ids=tokens.ids, cluster=zeros, stratum=zeros, distance=np.zeros(n), weight=np.ones(n), kept=np.ones(n, dtype=bool),
        num_tokens=tokens.num_tokens, num_supervised_tokens=tokens.num_supervised,
        loss=np.full(n, np.nan, dtype=np.float32), manifest={"provenance": {"model": model}},
    )


def _small_model(setting: Setting) -> str | None:
    model = setting.recipe.baselines.s2l.model
    return None if model is None else model.name_or_path


def _folder(setting: Setting) -> Path:
    recipe, s2l = setting.recipe, setting.recipe.baselines.s2l
    train = small_recipe(recipe).train.model_dump(exclude=FREE_TO_CHANGE)
    key = key_of(
        s2l.snapshots, setting.memo["small model"], recipe.data.template, recipe.data.max_length,
        setting.samples.provenance["data"], train, VERSION,
    )
    return setting.folder / "s2l" / key
