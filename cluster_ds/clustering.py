"""Stage 4: gradient proxies -> labels, distances and centroids, every cluster's size within exact bounds.

Shapes: N samples, H features, K clusters. Source: arXiv 2609.12584, section 4.1 (K-means with |C_c| <= alpha N / K); the
lower bound is ours, because the smallest cluster decides how much of the data can be kept.

The search (k-means++ restarts, Lloyd's iterations within the bounds) runs on a random projection; a few last passes, the
labels and the distances use the full vectors in float64, a block at a time (see `features`). The k-means++ restarts are
scikit-learn's, one thread each, side by side; labels do not depend on the number of threads.
"""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.cluster import KMeans, kmeans_plusplus
from threadpoolctl import threadpool_limits

from .assignment import Assignment, assign
from .features import BLOCK_ELEMENTS, PROJECTION_DIM, Points, as_features, available_memory, num_threads, one_thread_a_block
from .files import size_text

_SEARCH_ROWS = 32_768
_MAX_ITERATIONS = 100
_FULL_PASSES = 10  # at most, over the full vectors, behind a search in the projection
_TOLERANCE = 1e-7  # relative decrease of the cost
_PROJECTED_TOLERANCE = 1e-5  # of what is polished afterwards
_GUESSED_ITERATIONS, _GUESSED_FULL_PASSES = 20, 12  # of the estimate of the time
_FEW_MOVED = 0.3  # of the points
_SUM_SETS = 4  # of `variance.cluster_sums`
_COST_ARRAYS = 5  # [N, K] float64 at once: distances, the adjusted ones, a band, its softmax, a transpose


@dataclass(frozen=True)
class Clusters:
    """The result of `cluster`; clusters are numbered by falling size, then by their smallest id.

    Attributes:
        labels: int64 [N].
        distances: float64 [N], l2 distance to the own centroid.
        centroids: float64 [K, H].
        cap, floor: the bounds on the sizes that were enforced.
        num_moved: points that the bounds keep out of their nearest cluster.
        nearest_sizes: int64 [K], points that are nearest to each centroid: the sizes without bounds.
        gap: certified relative optimality gap of the assignment at these centroids.
        inertia: sum of squared distances.
    """

    labels: np.ndarray
    distances: np.ndarray
    centroids: np.ndarray
    cap: int
    floor: int
    num_moved: int
    nearest_sizes: np.ndarray
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
    features: np.ndarray | Points, num_clusters: int, *, alpha: float = 1.5, min_fraction: float = 0.0, seed: int = 0,
    num_restarts: int = 20, ids: np.ndarray | list[str] | None = None,
) -> Clusters:
    """Bounded K-means.

    Args:
        features: float [N, H], finite; unit vectors in CluSTER, but any will do. `Points` are read block by block.
        num_clusters: K; lowered, with a warning, to the number of distinct rows.
        alpha: sizes are at most alpha N / K.
        min_fraction: sizes are at least min_fraction N / K.
        seed: of the restarts.
        num_restarts: k-means++ starts of the search.
        ids: N sample ids, or numbers that sort like them; they draw the search's sample and break ties. Rows of an array are
            summed in their order as well, so that the order of the array does not matter at all.

    Raises:
        ValueError: for features that are not finite (naming ids), N < K, or impossible bounds.
    """
    names = np.arange(len(features)) if ids is None else np.asarray(ids)
    order = np.argsort(names, kind="stable")
    if isinstance(features, Points):
        points, by_id = features, order
    else:
        points, by_id = Points(as_features(features), order), np.arange(len(features))
        names = names[order]
    with one_thread_a_block():
        require_finite(points.norms(), names)
        size_bounds(len(points), num_clusters, alpha, min_fraction)
        distinct = _count_distinct(points, num_clusters)
        if distinct < num_clusters:
            warnings.warn(
                f"{distinct} distinct points for {num_clusters} clusters: num_clusters is lowered to {distinct}",
                stacklevel=2,
            )
            num_clusters = distinct
        floor, cap = size_bounds(len(points), num_clusters, alpha, min_fraction)
        centroids, labels, solution = _fit(points, by_id, num_clusters, floor, cap, seed, num_restarts)
        distances = _distances(points, centroids, labels)
    ranks = np.empty(len(points), dtype=np.int64)
    ranks[by_id] = np.arange(len(points))
    first = np.full(num_clusters, len(points))
    np.minimum.at(first, labels, ranks)
    rank = np.lexsort((first, -np.bincount(labels, minlength=num_clusters)))
    labels = np.argsort(rank)[labels]
    if not isinstance(features, Points):
        back = np.argsort(order)
        labels, distances = labels[back], distances[back]
    return Clusters(
        labels=labels, distances=distances, centroids=centroids[rank], cap=cap, floor=floor,
        num_moved=solution.num_moved, nearest_sizes=solution.cheapest_sizes[rank], gap=solution.gap,
        inertia=float((distances**2).sum()),
    )


def memory_needed(num_points: int, dim: int, num_clusters: int, largest: int, projection_stored: bool) -> int:
    """Bytes of anonymous memory that clustering and selecting take at most, beside what holds the features.

    Args:
        num_points, dim, num_clusters: N, H, K.
        largest: points of the largest cluster.
        projection_stored: whether the projection need not be made.
    """
    narrow = min(dim, PROJECTION_DIM)
    projection = 0 if projection_stored or dim <= PROJECTION_DIM else 4 * num_points * PROJECTION_DIM
    sample = 8 * min(num_points, _SEARCH_ROWS) * narrow * (2 + num_threads())
    rows = min(num_points, max(1, BLOCK_ELEMENTS // dim))
    blocks = num_threads() * 8 * (3 * max(BLOCK_ELEMENTS, dim) + rows * num_clusters * _SUM_SETS)
    duplicates = 4 * 4 * largest * narrow + num_threads() * 12 * 1024**2
    arrays = 8 * num_points * (_COST_ARRAYS * num_clusters + 16)
    return projection + max(sample, duplicates) + blocks + arrays + 8 * (_SUM_SETS + 2) * num_clusters * dim


def require_memory(
    num_points: int, dim: int, num_clusters: int, alpha: float, projection_stored: bool, besides: int = 0
) -> int:
    """Refuse a selection that this machine has no memory for.

    Args:
        num_points, dim, num_clusters, alpha: N, H, K and the greatest size of a cluster in parts of N / K.
        projection_stored: whether the projection need not be made.
        besides: bytes that later stages take.
    Returns:
        the bytes that are needed.
    Raises:
        ValueError: with both numbers.
    """
    largest = min(num_points, int(alpha * num_points / num_clusters) + 1)
    needed = memory_needed(num_points, dim, num_clusters, largest, projection_stored) + besides
    free = available_memory()
    if needed > free:
        raise ValueError(
            f"clustering {num_points} samples into {num_clusters} needs about {size_text(needed)} of memory, "
            f"{size_text(free)} are free: lower selection.num_clusters, or run launch/preprocess.py on a larger machine"
        )
    return needed


def seconds_needed(points: Points, num_clusters: int, num_restarts: int) -> float:
    """A guess from one timed block: passes over full vectors and the projection, and the restarts of the search."""
    some = min(len(points), max(1, 2 * num_threads() * BLOCK_ELEMENTS // points.dim))
    part = Points(points.features, points.positions[:some], None, points.dtype, points.device)
    centroids = part.take(np.arange(num_clusters) % some).double().cpu().numpy()
    with one_thread_a_block():
        started = time.perf_counter()
        _costs_and_sums(part, centroids)
    a_row = (time.perf_counter() - started) / some
    narrow = a_row * min(1.0, PROJECTION_DIM / points.dim)
    search = num_restarts * _GUESSED_ITERATIONS * min(len(points), _SEARCH_ROWS) * narrow
    full = _GUESSED_FULL_PASSES if points.dim > PROJECTION_DIM else 2
    return len(points) * (full * a_row + 2 * _GUESSED_ITERATIONS * narrow) + search


def _fit(
    points: Points, by_id: np.ndarray, k: int, floor: int, cap: int, seed: int, num_restarts: int
) -> tuple[np.ndarray, np.ndarray, Assignment]:
    """Search where it is cheap, then a few passes over the full vectors."""
    bounds = (np.full(k, floor), np.full(k, cap))
    free = (np.zeros(k, dtype=np.int64), np.full(k, len(points)))
    if points.dim <= PROJECTION_DIM:
        return _search(points, by_id, k, bounds, free, seed, num_restarts, _TOLERANCE)
    found = _search(points.projected(), by_id, k, bounds, free, seed, num_restarts, _PROJECTED_TOLERANCE)
    for limits in (bounds,) if found[2].num_moved else (free, bounds):  # bounds that bind would be broken again
        start = _means(points, found[1], k)
        polished = lloyd(points, start, limits[0], limits[1], _PROJECTED_TOLERANCE, _FULL_PASSES)
        if _within(polished[1], bounds):
            return polished
    raise AssertionError("the bounded assignment broke its bounds")


def _search(
    points: Points, by_id: np.ndarray, k: int, bounds: tuple[np.ndarray, np.ndarray],
    free: tuple[np.ndarray, np.ndarray], seed: int, num_restarts: int, tolerance: float,
) -> tuple[np.ndarray, np.ndarray, Assignment]:
    """Free K-means first; only if a bound is broken, the bounded loop from two starts."""
    rng = np.random.default_rng((seed, 1))
    chosen = np.sort(rng.permutation(len(points))[:_SEARCH_ROWS])  # by id, wherever it is stored
    sample = points.take(by_id[chosen]).cpu().numpy()
    found = lloyd(points, _best_start(sample, k, seed, num_restarts), *free, tolerance)
    if _within(found[1], bounds):
        return found
    _, seeds = kmeans_plusplus(sample, k, random_state=seed)
    starts = (found[0], sample[seeds].astype(np.float64))
    return min((lloyd(points, c, *bounds, tolerance) for c in starts), key=lambda f: f[2].cost)


def _best_start(sample: np.ndarray, k: int, seed: int, num_restarts: int) -> np.ndarray:
    """Centroids float64 [K, H] of the best of several k-means++ starts, each in one thread."""

    def start(number: int) -> KMeans:
        with threadpool_limits(limits=1):  # a new thread does not inherit OpenMP's limit
            return KMeans(k, n_init=1, random_state=seed + number, algorithm="lloyd").fit(sample)

    with ThreadPoolExecutor(num_threads()) as pool:
        fits = list(pool.map(start, range(num_restarts)))
    return min(fits, key=lambda fit: fit.inertia_).cluster_centers_.astype(np.float64)


def _within(labels: np.ndarray, bounds: tuple[np.ndarray, np.ndarray]) -> bool:
    sizes = np.bincount(labels, minlength=len(bounds[0]))
    return bool((sizes >= bounds[0]).all() and (sizes <= bounds[1]).all())


def lloyd(
    points: Points, centroids: np.ndarray, lo: np.ndarray, hi: np.ndarray, tolerance: float,
    max_iterations: int = _MAX_ITERATIONS,
) -> tuple[np.ndarray, np.ndarray, Assignment]:
    """Assign and average until the cost stands still; the labels are optimal for the returned centroids."""
    costs, nearest, sums = _costs_and_sums(points, centroids)
    solution = assign(costs, lo, hi)
    for _ in range(max_iterations):
        ahead = _means(points, solution.labels, len(centroids), _corrected(points, sums, nearest, solution.labels))
        costs, nearest, sums = _costs_and_sums(points, ahead)
        following = assign(costs, lo, hi, solution.prices)
        gain = solution.cost - following.cost
        if gain < 0:  # rounding
            break
        done = gain <= tolerance * solution.cost
        centroids, solution = ahead, following
        if done:
            break
    return centroids, solution.labels, solution


def _corrected(points: Points, sums: np.ndarray, nearest: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """The clusters' sums from those of the nearest points, where few points are elsewhere; None where many are."""
    moved = np.flatnonzero(labels != nearest)
    if len(moved) > _FEW_MOVED * len(labels):
        return None
    if not len(moved):
        return sums
    k, scale = len(sums), None if points.scale is None else points.scale[moved]
    part = replace(points, positions=points.positions[moved], scale=scale)
    to, off = (torch.from_numpy(of[moved]).to(points.device) for of in (labels, nearest))
    for _, change in part.map_blocks(lambda span, block, _: _sums(block, to[span], k) - _sums(block, off[span], k)):
        sums = sums + change
    return sums


def _costs_and_sums(points: Points, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In one pass: squared distances float64 [n, K], the nearest centroid int64 [n], and the sums [K, H] of its points."""
    k = len(centroids)
    centers = torch.tensor(centroids, dtype=points.dtype, device=points.device)
    norms = (centers**2).sum(dim=1)

    def work(_: slice, block: torch.Tensor, spare: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        squares = torch.mul(block, block, out=spare).sum(dim=1)
        costs = torch.addmm(norms + squares[:, None], block, centers.T, alpha=-2.0).clamp_(min=0.0)
        nearest = costs.argmin(dim=1)
        return costs.double().cpu().numpy(), nearest.cpu().numpy(), _sums(block, nearest, k)

    out, labels, sums = np.empty((len(points), k)), np.empty(len(points), dtype=np.int64), np.zeros_like(centroids)
    for span, (costs, nearest, part) in points.map_blocks(work):
        out[span], labels[span] = costs, nearest
        sums += part
    return out, labels, sums


def _sums(block: torch.Tensor, labels: torch.Tensor, k: int) -> np.ndarray:
    onehot = torch.zeros(k, len(block), dtype=block.dtype, device=block.device)
    onehot[labels, torch.arange(len(block), device=block.device)] = 1.0
    return (onehot @ block).double().cpu().numpy()


def _means(points: Points, labels: np.ndarray, k: int, sums: np.ndarray | None = None) -> np.ndarray:
    """float64 [K, H]; an empty cluster restarts at the farthest point of the cluster with the largest error.

    Args:
        points, labels, k: what is averaged.
        sums: [K, H] of each cluster's points, where they are known.
    """
    if sums is None:
        sums = np.zeros((k, points.dim))
        on_device = torch.from_numpy(labels).to(points.device)
        for _, part in points.map_blocks(lambda span, block, _: _sums(block, on_device[span], k)):
            sums += part
    counts = np.bincount(labels, minlength=k)
    means = sums / np.maximum(counts, 1)[:, None]
    if counts.all():
        return means
    labels = labels.copy()
    distances = _distances(points, means, labels)
    for empty in np.flatnonzero(counts == 0):
        worst = np.bincount(labels, weights=distances**2, minlength=k).argmax()
        point = int(np.where(labels == worst, distances, -1.0).argmax())
        means[empty] = points.take(slice(point, point + 1))[0].double().cpu().numpy()
        labels[point], distances[point] = empty, 0.0
    return means


def _distances(points: Points, centroids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """float64 [n], l2 distance of each point to its own centroid."""
    centers = torch.tensor(centroids, dtype=points.dtype, device=points.device)
    own = torch.from_numpy(labels).to(points.device)

    def work(span: slice, block: torch.Tensor, spare: torch.Tensor) -> np.ndarray:
        difference = block.sub_(torch.index_select(centers, 0, own[span], out=spare))
        return torch.linalg.vector_norm(difference, dim=1).cpu().numpy()

    return np.concatenate([part for _, part in points.map_blocks(work)]).astype(np.float64)


def _count_distinct(points: Points, enough: int) -> int:
    """Number of distinct points, counted no further than `enough`."""
    seen: set[bytes] = set()
    for start in range(0, len(points), 1024):
        for row in points.take(slice(start, start + 1024)).cpu().numpy():
            seen.add((row + 0.0).tobytes())  # + 0.0 turns -0.0 into 0.0
            if len(seen) >= enough:
                return len(seen)
    return len(seen)


def require_finite(norms: np.ndarray, names: np.ndarray) -> None:
    """Refuse vectors with NaN or infinity, by the ids in `names`.

    Raises:
        ValueError: naming up to ten.
    """
    bad = np.flatnonzero(~np.isfinite(norms))
    if len(bad):
        shown = ", ".join(str(names[i]) for i in bad[:10])
        raise ValueError(f"{len(bad)} of {len(norms)} feature rows hold NaN or infinity: samples {shown}")
