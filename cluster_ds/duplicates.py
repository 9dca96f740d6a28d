"""Stage 4b: near-duplicates, pairs of one cluster whose proxies' cosine is above a bound, at a cost linear in N. Ours.

Trees split every cluster at the median of a random direction until leaves hold at most 1,024 points; inside a leaf all
pairs are compared in the random projection. For every point its two nearest earlier ones (by id) within the bound, and the
four nearest of those that stay as far as the leaf can tell, are checked with the full vectors. A cluster that fits one leaf
needs one tree; in larger ones each of three trees has its chance to bring a pair into one leaf (measured recall:
tests/test_duplicates.py). Points are then taken in the order of their ids: one that has an earlier, not repeated one among
its links repeats it. So what is left out always has something near that stays, and chains of near points do not vanish.
Shapes: N points, P projection, m points of a leaf.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from .features import PROJECTION_DIM, Points, num_threads, one_thread_a_block

_LEAF = 1024
_TREES = 3
_EARLIER, _STAYING = 2, 4  # links of a point in a tree
_SLACK = 1.35  # on a squared distance in the projection, whose relative error is about sqrt(2 / P) = .09
_ROUNDING = 1e-9  # of a cosine
_CHECKED = 1024  # pairs whose full vectors are read at a time


@dataclass(frozen=True)
class Duplicates:
    """What `near_duplicates` returns.

    Attributes:
        first: int64 [N], for each point the earlier one that it repeats; itself where it repeats none.
        pairs: int64 [p, 2], near points that were found, the earlier one first.
        cosines: float64 [p], theirs.
        min_cosine: the bound.
    """

    first: np.ndarray
    pairs: np.ndarray
    cosines: np.ndarray
    min_cosine: float

    @property
    def repeated(self) -> np.ndarray:
        """Bool [N], points that repeat an earlier one."""
        return self.first != np.arange(len(self.first))

    @property
    def num_groups(self) -> int:
        """Points that are repeated."""
        return len(np.unique(self.first[self.repeated]))


def near_duplicates(points: Points, labels: np.ndarray, by_id: np.ndarray, min_cosine: float, seed: int = 0) -> Duplicates:
    """Find near-duplicates inside clusters.

    Args:
        points: unit vectors [N, H].
        labels: int64 [N].
        by_id: int64 [N], the points in the order of their ids.
        min_cosine: of a pair.
        seed: of the trees.
    """
    with one_thread_a_block():
        near = points.projected() if points.dim > PROJECTION_DIM else points
        bound, slack = 2.0 - 2.0 * min_cosine, 1.0 if near is points else _SLACK
        ranks = np.empty(len(points), dtype=np.int64)
        ranks[by_id] = np.arange(len(points))

        found = []
        with ThreadPoolExecutor(num_threads()) as pool:
            for c in range(int(labels.max()) + 1):
                members = by_id[labels[by_id] == c]
                vectors = near.take(members).float().cpu().numpy() + 0.0  # -0.0 becomes 0.0
                distinct, same = _distinct(vectors)
                found.append(members[same])
                vectors = vectors[distinct]
                rng = np.random.default_rng((seed, 4, c))
                for _ in range(_TREES if len(distinct) > _LEAF else 1):
                    for close in pool.map(lambda leaf, v=vectors: _links(v, leaf, bound, slack), _leaves(vectors, rng)):
                        found.append(members[distinct[close]])
        pairs = np.unique(np.concatenate([np.empty((0, 2), dtype=np.int64), *found]), axis=0)
        cosines = _cosines(points, pairs)
    sure = cosines >= min_cosine - _ROUNDING
    pairs, cosines = pairs[sure], cosines[sure]
    first = list(range(len(points)))
    for i in np.lexsort((-cosines, ranks[pairs[:, 1]])).tolist():  # by the later point's id, its nearest one first
        earlier, later = pairs[i].tolist()
        if first[later] != later:
            continue
        if first[earlier] == earlier:
            first[later] = earlier
        elif cosines[i] >= 1.0 - _ROUNDING:  # the same vector: what it repeats is near to this one as well
            first[later] = first[earlier]
    return Duplicates(np.array(first), pairs, cosines, min_cosine)


def _distinct(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first rows of each value, ascending, and int64 [p, 2], every other row behind the first one of its value.

    Many copies of one row would fill whole leaves, and the trees would part them by chance.
    """
    values = np.ascontiguousarray(vectors).view(np.dtype((np.void, vectors.shape[1] * vectors.itemsize)))[:, 0]
    _, first, of = np.unique(values, return_index=True, return_inverse=True)
    others = np.flatnonzero(first[of] != np.arange(len(vectors)))
    return np.sort(first), np.stack([first[of[others]], others], axis=1)


def _leaves(vectors: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows of each leaf, ascending."""
    waiting, leaves = [np.arange(len(vectors))], []
    while waiting:
        rows = waiting.pop()
        if len(rows) <= _LEAF:
            leaves.append(rows)
            continue
        order = np.argsort(vectors[rows] @ rng.standard_normal(vectors.shape[1], dtype=np.float32), kind="stable")
        half = len(rows) // 2
        waiting += [np.sort(rows[order[:half]]), np.sort(rows[order[half:]])]
    return leaves


def _links(vectors: np.ndarray, rows: np.ndarray, bound: float, slack: float) -> np.ndarray:
    """int64 [p, 2], each row of a leaf behind earlier ones that it may repeat.

    Args:
        vectors: of all rows.
        rows: of the leaf, in the order of their ids.
        bound: on the squared distance of a pair.
        slack: factor of what is linked, since distances in the projection are not exact.
    """
    x = vectors[rows]
    squares = (x**2).sum(axis=1)
    distances = squares[:, None] + squares[None] - 2.0 * (x @ x.T)
    distances[np.triu_indices(len(rows))] = np.inf
    stays, found = np.ones(len(rows), dtype=bool), []
    for row in np.flatnonzero(distances.min(axis=1) <= slack * bound + 1e-6):
        mine = distances[row]
        staying = np.where(stays, mine, np.inf)
        for candidates, most in ((mine, _EARLIER), (staying, _STAYING)):
            nearest = np.argpartition(candidates, min(most, len(rows) - 1))[:most]
            found += [(near, row) for near in nearest if candidates[near] <= slack * bound + 1e-6]
        stays[row] = staying.min() > bound + 1e-6
    return rows[np.array(found, dtype=np.int64).reshape(-1, 2)]


def _cosines(points: Points, pairs: np.ndarray) -> np.ndarray:
    parts = []
    for start in range(0, len(pairs), _CHECKED):
        a, b = (points.take(pairs[start : start + _CHECKED, side]) for side in (0, 1))
        parts.append(torch.nn.functional.cosine_similarity(a, b, dim=1).double().cpu().numpy())
    return np.concatenate(parts) if parts else np.zeros(0)
