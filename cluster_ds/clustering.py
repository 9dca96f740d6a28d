"""Stage 4: gradient proxies -> labels, distances and centroids, every cluster's size within exact bounds.

Shapes: N samples, H features, K clusters. Source: arXiv 2609.12584, section 4.1 (K-means with |C_c| <= alpha N / K); the
lower bound is ours, because the smallest cluster decides how much of the data can be kept.

The search (k-means++ restarts, Lloyd's iterations within the bounds) runs on a random projection; a few last passes, the
labels and the distances use the full vectors, a block of rows at a time. One thread computes, so that labels do not depend
on the machine's count.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from sklearn.cluster import KMeans, kmeans_plusplus
from threadpoolctl import threadpool_limits

from .assignment import Assignment, assign

_BLOCK = 4096  # rows converted to float64 at a time
_SEARCH_ROWS = 50_000
_SEARCH_DIM = 256
_MAX_ITERATIONS = 100
_FULL_PASSES = 3  # over the full vectors, behind a search in the projection
_TOLERANCE = 1e-7  # relative decrease of the cost


@dataclass(frozen=True)
class Clusters:
    """The result of `cluster`; clusters are numbered by falling size, then by their smallest id.

    Attributes:
        labels: int64 [N].
        distances: float64 [N], l2 distance to the own centroid.
        centroids: float64 [K, H].
        cap, floor: the bounds on the sizes that were enforced.
        num_moved: points that the bounds keep out of their nearest cluster.
        gap: certified relative optimality gap of the assignment at these centroids.
        inertia: sum of squared distances.
    """

    labels: np.ndarray
    distances: np.ndarray
    centroids: np.ndarray
    cap: int
    floor: int
    num_moved: int
    gap: float
    inertia: float

    @property
    def sizes(self) -> np.ndarray:
        """int64 [K]."""
        return np.bincount(self.labels, minlength=len(self.centroids))


def size_bounds(num_points: int, num_clusters: int, alpha: float, min_fraction: float) -> tuple[int, int]:
    """Least and greatest cluster size.

    The cap is floor(alpha N / K), or its ceiling where K times the floor cannot hold N. alpha = 1 asks for equal sizes,
    so it sets the lower bound as well. No cluster may be empty.

    Raises:
        ValueError: for alpha < 1, min_fraction outside [0, 1], or fewer points than clusters.
    """
    if num_points < num_clusters:
        raise ValueError(
            f"{num_points} samples cannot fill {num_clusters} clusters: lower selection.num_clusters or add data"
        )
    if alpha < 1:
        raise ValueError(f"alpha {alpha} is below 1: {num_clusters} clusters of at most alpha N / K cannot hold N")
    if not 0 <= min_fraction <= 1:
        raise ValueError(f"min_fraction {min_fraction} is outside [0, 1]")
    share = num_points / num_clusters
    cap = int(np.floor(alpha * share + 1e-9))
    if cap * num_clusters < num_points:
        cap = int(np.ceil(alpha * share))
    floor = num_points // num_clusters if alpha == 1 else int(np.floor(min_fraction * share + 1e-9))
    return max(1, floor), cap


def cluster(
    features: np.ndarray, num_clusters: int, *, alpha: float = 1.5, min_fraction: float = 0.0, seed: int = 0,
    num_restarts: int = 20, ids: np.ndarray | list[str] | None = None,
) -> Clusters:
    """Bounded K-means.

    Args:
        features: float [N, H], finite; unit vectors in CluSTER, but any will do.
        num_clusters: K; lowered, with a warning, to the number of distinct rows.
        alpha: sizes are at most alpha N / K.
        min_fraction: sizes are at least min_fraction N / K.
        seed: of the restarts and the projection.
        num_restarts: k-means++ starts of the search.
        ids: N sample ids; the result does not depend on the order of the rows when they are given.

    Raises:
        ValueError: for features that are not finite (naming ids), N < K, or impossible bounds.
    """
    features = np.asarray(features)
    names = np.arange(len(features)) if ids is None else np.asarray(ids)
    _require_finite(features, names)
    size_bounds(len(features), num_clusters, alpha, min_fraction)
    order = np.argsort(names, kind="stable")
    features = features[order]
    distinct = _count_distinct(features, num_clusters)
    if distinct < num_clusters:
        warnings.warn(
            f"{distinct} distinct points for {num_clusters} clusters: num_clusters is lowered to {distinct}",
            stacklevel=2,
        )
        num_clusters = distinct
    floor, cap = size_bounds(len(features), num_clusters, alpha, min_fraction)
    with threadpool_limits(limits=1):
        centroids, labels, solution = _fit(features, num_clusters, floor, cap, seed, num_restarts)
        distances = _distances(features, centroids, labels)
    first = np.array([np.flatnonzero(labels == c)[0] for c in range(num_clusters)])
    rank = np.lexsort((first, -np.bincount(labels, minlength=num_clusters)))
    renumber = np.argsort(rank)
    unsorted = np.argsort(order)
    return Clusters(
        labels=renumber[labels][unsorted], distances=distances[unsorted], centroids=centroids[rank], cap=cap, floor=floor,
        num_moved=solution.num_moved, gap=solution.gap, inertia=float((distances**2).sum()),
    )


def _fit(
    features: np.ndarray, k: int, floor: int, cap: int, seed: int, num_restarts: int
) -> tuple[np.ndarray, np.ndarray, Assignment]:
    """Search where it is cheap, then a few passes over the full vectors."""
    bounds = (np.full(k, floor), np.full(k, cap))
    free = (np.zeros(k, dtype=np.int64), np.full(k, len(features)))
    points = _project(features, seed)
    found = _search(points, k, bounds, free, seed, num_restarts)
    if points is features:
        return found
    for limits in (free, bounds) if _within(found[1], bounds) else (bounds,):
        start = _means(features, found[1], k)
        polished = _lloyd(features, start, limits[0], limits[1], _FULL_PASSES)
        if _within(polished[1], bounds):
            return polished
    raise AssertionError("the bounded assignment broke its bounds")


def _search(
    points: np.ndarray, k: int, bounds: tuple[np.ndarray, np.ndarray], free: tuple[np.ndarray, np.ndarray], seed: int,
    num_restarts: int,
) -> tuple[np.ndarray, np.ndarray, Assignment]:
    """Free K-means first; only if a bound is broken, the bounded loop from two starts."""
    rng = np.random.default_rng((seed, 1))
    rows = np.sort(rng.permutation(len(points))[:_SEARCH_ROWS])
    sample = points[rows].astype(np.float64)
    search = KMeans(k, n_init=num_restarts, random_state=seed, algorithm="lloyd").fit(sample)
    found = _lloyd(points, search.cluster_centers_, *free)
    if _within(found[1], bounds):
        return found
    _, seeds = kmeans_plusplus(sample, k, random_state=seed)
    return min((_lloyd(points, c, *bounds) for c in (found[0], sample[seeds])), key=lambda f: f[2].cost)


def _within(labels: np.ndarray, bounds: tuple[np.ndarray, np.ndarray]) -> bool:
    sizes = np.bincount(labels, minlength=len(bounds[0]))
    return bool((sizes >= bounds[0]).all() and (sizes <= bounds[1]).all())


def _lloyd(
    features: np.ndarray, centroids: np.ndarray, lo: np.ndarray, hi: np.ndarray, max_iterations: int = _MAX_ITERATIONS
) -> tuple[np.ndarray, np.ndarray, Assignment]:
    """Assign and average until the cost stands still; the labels are optimal for the returned centroids."""
    solution = assign(_squared_distances(features, centroids), lo, hi)
    for _ in range(max_iterations):
        previous = solution
        centroids = _means(features, solution.labels, len(centroids))
        solution = assign(_squared_distances(features, centroids), lo, hi, previous.prices)
        if previous.cost - solution.cost <= _TOLERANCE * previous.cost:
            break
    return centroids, solution.labels, solution


def _means(features: np.ndarray, labels: np.ndarray, k: int) -> np.ndarray:
    """float64 [K, H]; an empty cluster restarts at the farthest point of the cluster with the largest error."""
    sums = np.zeros((k, features.shape[1]))
    for start, block in _blocks(features):
        onehot = np.zeros((k, len(block)))
        onehot[labels[start : start + len(block)], np.arange(len(block))] = 1.0
        sums += onehot @ block
    counts = np.bincount(labels, minlength=k)
    means = sums / np.maximum(counts, 1)[:, None]
    if counts.all():
        return means
    labels = labels.copy()
    distances = _distances(features, means, labels)
    for empty in np.flatnonzero(counts == 0):
        worst = np.bincount(labels, weights=distances**2, minlength=k).argmax()
        point = int(np.where(labels == worst, distances, -1.0).argmax())
        means[empty], labels[point], distances[point] = features[point], empty, 0.0
    return means


def _squared_distances(features: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """float64 [N, K]."""
    out = np.empty((len(features), len(centroids)))
    norms = (centroids**2).sum(axis=1)
    for start, block in _blocks(features):
        out[start : start + len(block)] = (block**2).sum(axis=1)[:, None] - 2.0 * (block @ centroids.T) + norms
    return np.maximum(out, 0.0, out=out)


def _distances(features: np.ndarray, centroids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """float64 [N], l2 distance of each row to its own centroid."""
    parts = [
        np.linalg.norm(block - centroids[labels[start : start + len(block)]], axis=1)
        for start, block in _blocks(features)
    ]
    return np.concatenate(parts)


def _blocks(features: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(features), _BLOCK):
        yield start, features[start : start + _BLOCK].astype(np.float64)


def _project(features: np.ndarray, seed: int) -> np.ndarray:
    """float32 [N, _SEARCH_DIM], distances kept to about 1 / sqrt(_SEARCH_DIM); small features as they are."""
    dim = features.shape[1]
    if dim <= _SEARCH_DIM:
        return features
    matrix = np.random.default_rng((seed, 0)).standard_normal((dim, _SEARCH_DIM)) / np.sqrt(_SEARCH_DIM)
    return np.concatenate([(block @ matrix).astype(np.float32) for _, block in _blocks(features)])


def _count_distinct(features: np.ndarray, enough: int) -> int:
    """Number of distinct rows, counted no further than `enough`."""
    seen: set[bytes] = set()
    for row in features:
        seen.add((row + 0.0).tobytes())  # + 0.0 turns -0.0 into 0.0
        if len(seen) >= enough:
            break
    return len(seen)


def _require_finite(features: np.ndarray, names: np.ndarray) -> None:
    if features.ndim != 2 or features.shape[1] == 0:
        raise ValueError(f"features must be [N, H], got shape {features.shape}")
    bad = [i for start, block in _blocks(features) for i in start + np.flatnonzero(~np.isfinite(block).all(axis=1))]
    if bad:
        shown = ", ".join(str(names[i]) for i in bad[:10])
        raise ValueError(f"{len(bad)} of {len(features)} feature rows hold NaN or infinity: samples {shown}")
