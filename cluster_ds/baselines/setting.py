"""What baselines are given, and what they share: the budget, the cost, the plan, work in shards that a kill does not lose.

Shapes: N samples.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..distributed import Ranks
from ..messages import Progress
from ..plan import Plan
from ..planning import Clustered
from ..prepare import Samples
from ..recipe import Recipe
from ..shards import missing_shards, open_shard, shard_seconds, write_shard
from ..tokens import TokenTable

Arrays = dict[str, np.ndarray]
T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """What a selection takes.

    Attributes:
        forwards, backwards: samples through the model that is trained.
        small_forwards, small_backwards: samples through S2L's small model.
        seconds: wall time, of all ranks together; loading models not counted. None: not known.
    """

    forwards: int = 0
    backwards: int = 0
    small_forwards: int = 0
    small_backwards: int = 0
    seconds: float | None = 0.0


@dataclass(frozen=True)
class Budget:
    """How much an arm may keep: samples, or, where it is given, about so many tokens."""

    num_samples: int
    num_tokens: int | None = None

    def first_of(self, order: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """The first rows of an order that the budget pays for; at least one.

        Args:
            order: int64 [n], rows.
            num_tokens: int64 [N], of every row.
        """
        if self.num_tokens is None:
            return order[: self.num_samples]
        away = np.abs(np.cumsum(num_tokens[order]) - self.num_tokens)
        return order[: int(away.argmin()) + 1]


@dataclass(frozen=True)
class Setting:
    """What is compared: a recipe's samples, model and ranks.

    Attributes:
        recipe: of this comparison.
        samples: tokens and model.
        base: CluSTER's own plan, whose clusters label the other arms' logs.
        folder: where scores are kept.
        ranks: all of them call `score`.
        validation: held-out rows that may decide; none of them is a test row.
        validation_rows: int64, which of them.
        clustered: the samples in clusters; on rank 0 alone.
        seconds_to_cluster: wall time of extraction and clustering; None: not known.
        memo: hashes that take time, by name.
    """

    recipe: Recipe
    samples: Samples
    base: Plan
    folder: Path
    ranks: Ranks
    validation: TokenTable | None = None
    validation_rows: np.ndarray | None = None
    clustered: Clustered | None = None
    seconds_to_cluster: float | None = 0.0
    memo: dict[str, str] = field(default_factory=dict)

    @cached_property
    def usable(self) -> np.ndarray:
        """Int64, the rows that may be kept, in the order of their ids, so that the file's order does not matter."""
        by_id = np.argsort(np.asarray(self.base.ids), kind="stable")
        return by_id[self.base.cluster[by_id] >= 0]

    @property
    def extraction_cost(self) -> Cost:
        """One forward pass over all samples and the clustering, which all plans from clusters share."""
        return Cost(forwards=len(self.samples.tokens), seconds=self.seconds_to_cluster)

    def shuffled(self, seed: int) -> np.ndarray:
        """The usable rows int64 [n] in the order in which `selection.draw` takes them in the first epoch."""
        return np.random.default_rng((seed, 2, 0, 0)).permutation(self.usable)

    def plan(
        self, name: str, rows: np.ndarray, cost: Cost, facts: dict[str, Any] | None = None, *, redraw_seed: int | None = None
    ) -> Plan:
        """An arm's plan: one stratum, weight 1.

        Args:
            name: of the arm.
            rows: int64 [n], that are kept.
            cost: of the selection.
            facts: for the manifest.
            redraw_seed: draw as many anew in every epoch.
        """
        base, m = self.base, self.base.manifest
        keep = np.zeros(len(base), dtype=bool)
        keep[rows] = True
        pool = base.cluster >= 0
        drawn_from = keep if redraw_seed is None else pool
        counts = np.bincount(base.cluster[rows], minlength=base.num_clusters)
        manifest = {
            "provenance": m["provenance"], "selection": {"arm": name, **(facts or {})}, "num_samples": len(base),
            "num_clustered": int(pool.sum()), "num_kept": len(rows), "counts": counts.tolist(),
            **{key: m[key] for key in ("sizes", "cap", "floor", "num_moved", "gap", "inertia")},
            "weights": [1.0] * base.num_clusters, "effective_sample_size": 1.0,
            "excluded": {"zero proxy": int((~pool).sum())}, "cost": asdict(cost),
        }
        return Plan(
            ids=base.ids, cluster=base.cluster, stratum=np.where(drawn_from, 0, -1).astype(np.int32), distance=base.distance,
            weight=drawn_from.astype(np.float64), kept=keep, num_tokens=base.num_tokens,
            num_supervised_tokens=base.num_supervised_tokens, loss=base.loss, source=base.source, manifest=manifest,
            pool=None if redraw_seed is None else pool, redraw_seed=redraw_seed,
        )

    def training_plan(self, name: str, rows: np.ndarray) -> Plan:
        """For a baseline's own training: the same whatever the seed of the clusters was, all samples in one."""
        plan = self.plan(name, rows, Cost())
        return replace(plan, cluster=np.minimum(plan.cluster, 0))


def key_of(*parts: Any) -> str:
    """Hash of what decides a result; parts are what JSON holds."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def in_shards(
    folder: Path, key: str, shards: Sequence[np.ndarray], begin: Callable[[], Callable[[np.ndarray], Arrays]], ranks: Ranks,
    label: str,
) -> None:  # collective
    """Compute arrays of all rows, shard by shard, on whichever rank is free; finished shards are not made again.

    Args:
        folder: of the shards.
        key: hash of everything that decides the arrays.
        shards: int64 arrays of rows; each row once.
        begin: called once on a rank that has work; gives what computes the arrays [n, ...] of n rows.
        ranks: all call this.
        label: of the lines that tell.
    """

    def unfinished() -> list[int]:
        folder.mkdir(parents=True, exist_ok=True)
        return missing_shards(folder, len(shards))

    missing = ranks.on_main(unfinished)
    progress, compute = Progress(label, len(missing) if ranks.is_main else 0, "shards", ranks.print), None
    for number in ranks.shares(len(missing)):
        if compute is None:
            compute = begin()
        shard, began = missing[number], time.perf_counter()
        arrays = {"rows": shards[shard].astype(np.int64), **compute(shards[shard])}
        write_shard(folder, shard, key, arrays, time.perf_counter() - began)
        if ranks.is_main:
            progress.reach(number + 1)
    ranks.gather(len(missing))  # all shards are on disk
    progress.close()


def read_shards(folder: Path, key: str, shards: Sequence[np.ndarray]) -> Arrays:
    """What `in_shards` has left, verified, in the order of the rows."""
    parts = [open_shard(folder, number, key, rows) for number, rows in enumerate(shards)]
    back = np.argsort(np.concatenate([part["rows"] for part in parts]))
    return {name: np.concatenate([part[name] for part in parts])[back] for name in parts[0] if name != "rows"}


def seconds_of(folder: Path, num_shards: int, ranks: Ranks) -> float | None:
    """Wall seconds that the shards took, the ranks working side by side; None if that was not noted."""
    seconds = shard_seconds(folder, num_shards)
    return None if seconds is None else seconds / ranks.world_size


def in_all(*seconds: float | None) -> float | None:
    """Their sum; None if one is not known."""
    return None if None in seconds else sum(s for s in seconds if s is not None)


def alone(recipe: Recipe, **sections: Any) -> Recipe:
    """A recipe for a baseline's own training: other sections, and no held-out rows that end it or choose its model."""
    evaluate = recipe.evaluate.model_copy(update={"every": None, "keep_best": False, "patience": None})
    return recipe.model_copy(update={"evaluate": evaluate, **sections})


def remove_training(folder: Path, *, model: bool = True) -> None:
    """Delete what a finished training no longer needs, but for its logs; a kill may have left it."""
    for name in ("checkpoints", "model") if model else ("checkpoints",):
        shutil.rmtree(folder / name, ignore_errors=True)


def nearest_in_tokens(
    make: Callable[[int], T | None], tokens_of: Callable[[T], int], low: int, high: int, wanted: int
) -> T:
    """What `make` gives for the number from `low` to `high` whose tokens come nearest, by bisection.

    Args:
        make: gives None where a number is too high; more samples have more tokens, up to the luck of a draw.
        tokens_of: what it gave.
        low, high, wanted: see above; `low` must be possible.
    """
    best: T | None = None
    while low <= high:
        middle = (low + high) // 2
        made = make(middle)
        if made is None:
            high = middle - 1
            continue
        tokens = tokens_of(made)
        if best is None or abs(tokens - wanted) < abs(tokens_of(best) - wanted):
            best = made
        low, high = (middle + 1, high) if tokens < wanted else (low, middle - 1)
    assert best is not None
    return best
