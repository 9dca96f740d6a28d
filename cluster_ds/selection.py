"""Stage 5: labels and distances -> which samples are kept, and their weights in the loss.

Sizes |C_c| count what the weights must restore; the pool is what may be kept of it. Shapes: N samples, K clusters, M kept,
n_c of them of cluster c. Source: arXiv 2609.12584, sections 4.2 and 4.3; the quotas beside "equal", trimming and redrawing
are ours.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

_SMALL_SHARE = 0.3  # warn when the smallest cluster limits the selection to less than this
QUOTAS = ("equal", "proportional", "neyman")
_CHOICES = {
    "choice": ("peripheral", "random", "core"), "balance": ("whole", "random_first"), "quota": QUOTAS,
    "weighting": ("cluster", "none", "calibrated"), "redraw": ("none", "epoch"),
}


@dataclass(frozen=True)
class PlanSettings:
    """How a plan is made from features; a recipe's `selection` section says the same.

    Attributes:
        num_clusters: K.
        alpha, min_fraction, num_restarts: see `clustering.cluster`.
        choice, balance, quota, ratio, keep, trim: see `select`.
        weighting: "cluster", "none", or "calibrated" (see `calibration`).
        min_effective: least effective sample size of the calibration, over all kept samples and apart from cluster weights.
        dedup: whether near-duplicates are left out but for the first of each group; they are reported anyway.
        near_duplicate_cosine: from which cosine on two proxies are near-duplicates.
        redraw: "epoch" keeps other samples in every epoch, "none" the same.
        seed: of the clustering and the draws.
        normalize: whether features are divided by their lengths before they are clustered.
    """

    num_clusters: int = 4
    alpha: float = 1.5
    min_fraction: float = 0.0
    choice: str = "peripheral"
    balance: str = "whole"
    quota: str = "equal"
    ratio: float | None = None
    keep: float | None = None
    trim: float = 0.0
    weighting: str = "cluster"
    min_effective: float = 0.8
    dedup: bool = False
    near_duplicate_cosine: float = 0.99
    redraw: str = "none"
    seed: int = 0
    num_restarts: int = 20
    normalize: bool = True

    def __post_init__(self) -> None:
        """Refuse what is out of range, or what does not go together."""
        if self.num_clusters < 1:
            raise ValueError(f"num_clusters is {self.num_clusters}: at least 1")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} {value!r}: {', '.join(allowed[:-1])} or {allowed[-1]}")
        if self.ratio is not None and self.keep is not None:
            raise ValueError(f"ratio ({self.ratio}) and keep ({self.keep}) both set the budget: give one of them")
        for name in ("ratio", "keep", "min_effective"):
            share = getattr(self, name)
            if share is not None and not 0 < share <= 1:
                raise ValueError(f"{name} {share} is outside (0, 1]")
        if not 0 <= self.trim < 1:
            raise ValueError(f"trim {self.trim} is outside [0, 1)")
        if self.keep is not None and self.keep > 1 - self.trim + 1e-9:
            raise ValueError(f"keep {self.keep} is more than trim {self.trim} leaves of the samples: lower one of them")
        if not 0 < self.near_duplicate_cosine <= 1:
            raise ValueError(f"near_duplicate_cosine {self.near_duplicate_cosine} is outside (0, 1]")
        if self.balance == "random_first" and self.quota != "equal":
            raise ValueError(
                f"balance random_first cuts clusters to equal sizes, quota {self.quota} to others: use balance whole"
            )
        if self.redraw == "epoch" and self.choice != "random":
            raise ValueError(f"redraw epoch draws at random, but choice is {self.choice}: set choice random, or redraw none")
        if self.redraw == "epoch" and self.weighting == "calibrated":
            raise ValueError("weighting calibrated is for fixed samples, redraw epoch changes them: use weighting cluster")


@dataclass(frozen=True)
class Selection:
    """What `select` returns.

    Attributes:
        kept: bool [N].
        pool: bool [N], what could have been kept: not dropped, not trimmed.
        weights: float64 [N], the weight of each sample in the loss, also of those that are not kept.
        counts: int64 [K], n_c, samples kept of each cluster.
    """

    kept: np.ndarray
    pool: np.ndarray
    weights: np.ndarray
    counts: np.ndarray


def cluster_weights(sizes: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Weight each cluster so that batches which hold the clusters in proportion to n_c keep the full data's mean gradient.

    Args:
        sizes: int64 [K], samples per cluster before balancing.
        counts: int64 [K], n_c; equal ones by default.

    Returns:
        float64 [K], w_c = (|C_c| / N) (M / n_c), which is |C_c| K / N for equal n_c; the mean over kept samples is 1.

    Raises:
        ValueError: if a cluster is empty.
    Source: arXiv 2609.12584, section 4.3.
    """
    sizes = np.asarray(sizes)
    if (sizes <= 0).any():
        raise ValueError(f"cluster {int(np.argmin(sizes))} is empty: sizes {sizes.tolist()}")
    counts = np.ones_like(sizes) if counts is None else counts
    return sizes * (counts.sum() / sizes.sum()) / counts


def quota_counts(
    sizes: np.ndarray, available: np.ndarray, *, quota: str = "equal", ratio: float | None = None, keep: float | None = None,
    spreads: np.ndarray | None = None, num_samples: int | None = None,
) -> np.ndarray:
    """n_c, the number of samples kept of each cluster.

    Args:
        sizes: int64 [K], |C_c|.
        available: int64 [K], how many of them may be kept.
        quota: "equal" keeps the same number of each; "proportional" n_c ~ |C_c|; "neyman" n_c ~ |C_c| S_c, which gives the
            weighted batch gradient the least variance. All three keep the same number in all, as far as it can be had.
        ratio: r in (0, 1]: in all K max(1, floor(r n_min)) with n_min the least available; 1 if `keep` is None as well.
        keep: a budget as a share of all N samples instead.
        spreads: float64 [K], S_c for "neyman".
        num_samples: N, with the samples that are in no cluster; the sum of sizes by default.

    Raises:
        ValueError: if the budget is more than can be kept, with the remedy.
    """
    k, total = len(sizes), int(sizes.sum()) if num_samples is None else num_samples
    smallest = int(available.min())
    if smallest == 0:
        raise ValueError(f"nothing of cluster {int(available.argmin())} is left to keep: lower selection.trim")
    if keep is None:
        each = max(1, int(np.floor((1.0 if ratio is None else ratio) * smallest + 1e-9)))
        budget = k * each
    else:
        budget = max(k, budget_of(keep, total))
        each = budget // k
    if quota == "equal":
        if each > smallest:
            most = int(1000 * k * smallest / total) / 1000
            raise ValueError(
                f"selection.keep {keep:g} needs {each} samples of every cluster, but cluster {int(available.argmin())} has "
                f"{smallest}: at most {most} can be kept with sizes {available.tolist()}; lower keep or trim, raise "
                "selection.min_fraction, use fewer clusters, or selection.quota proportional, which can keep all that trim "
                "and dedup leave"
            )
        return np.full(k, each, dtype=np.int64)
    if budget > available.sum():
        raise ValueError(
            f"selection.keep {keep:g} needs {budget} samples, but {int(available.sum())} of {total} are left after trimming "
            "and deduplication: lower keep or selection.trim"
        )
    shares = sizes.astype(np.float64)
    if quota == "neyman":
        if spreads is None:
            raise ValueError("quota 'neyman' needs the clusters' spreads")
        if spreads.max() > 0:  # else all are alike, and any quota is Neyman's
            shares = shares * np.maximum(spreads, 1e-9 * float(spreads.max()))
    return apportion(shares, budget, available)


def budget_of(keep: float, num_samples: int) -> int:
    """Samples that a share of all is, rounded down."""
    return int(np.floor(keep * num_samples + 1e-9))


def apportion(shares: np.ndarray, total: int, most: np.ndarray) -> np.ndarray:
    """Whole numbers in proportion to shares, each from 1 to `most`, that sum to `total`; ties to the lower index.

    Args:
        shares: float64 [K], positive.
        total: from K to the sum of `most`.
        most: int64 [K].
    """
    low, high = 0.0, float((most / shares).max())  # clip(x shares, 1, most) grows from K to sum(most)
    for _ in range(200):
        middle = (low + high) / 2
        if np.clip(middle * shares, 1, most).sum() < total:
            low = middle
        else:
            high = middle
    exact = np.clip(high * shares, 1, most)
    counts = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    while (short := total - int(counts.sum())) != 0:  # rounding alone: less than one a cluster
        possible = order[counts[order] < most[order]] if short > 0 else order[::-1][counts[order[::-1]] > 1]
        counts[possible[: abs(short)]] += np.sign(short)
    return counts


def draw(strata: np.ndarray, by_id: np.ndarray, pool: np.ndarray, counts: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """A random part of each stratum, a pure function of (seed, epoch).

    Args:
        strata: int [N]; negative: in none.
        by_id: int64 [N], the rows in the order of their ids.
        pool: bool [N], rows that may be drawn.
        counts: int64 [K], how many of each stratum.
        seed, epoch: of the draw.
    Returns:
        bool [N].
    """
    kept = np.zeros(len(strata), dtype=bool)
    candidates = by_id[pool[by_id]]
    of = strata[candidates]
    for stratum, count in enumerate(counts):
        members = candidates[of == stratum]
        kept[np.random.default_rng((seed, 2, stratum, epoch)).permutation(members)[:count]] = True
    return kept


def pool_of(labels: np.ndarray, distances: np.ndarray, by_id: np.ndarray, counted: np.ndarray, trim: float) -> np.ndarray:
    """Bool [N], what may be kept: all that is counted but for the outermost share of every cluster; ties by id."""
    pool = counted.copy()
    order = by_id[np.lexsort((-distances[by_id], labels[by_id]))]
    order = order[counted[order]]
    of = labels[order]
    sizes = np.bincount(of, minlength=int(labels.max()) + 1)
    place = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[of]
    pool[order[place < np.floor(trim * sizes + 1e-9)[of]]] = False
    return pool


def select(
    labels: np.ndarray, distances: np.ndarray, ids: list[str] | np.ndarray, settings: PlanSettings, *,
    spreads: np.ndarray | None = None, dropped: np.ndarray | None = None, num_samples: int | None = None,
) -> Selection:
    """Keep a part of every cluster.

    Args:
        labels: int64 [N], every cluster occurs.
        distances: float64 [N], to the own centroid.
        ids: N sample ids, or numbers that sort like them; they break ties and key the random draws, so the order of the rows
            does not matter.
        settings: of these, choice ("peripheral" keeps the farthest, "core" the nearest, "random" any), balance ("whole"
            chooses from the whole cluster, "random_first" cuts every cluster to n_min at random before), trim (the outermost
            share of every cluster that is not kept, because broken rows lie there; it still counts in |C_c|), weighting
            ("none" for 1), quota, ratio, keep (see `quota_counts`) and seed count here.
        spreads: float64 [K], S_c for quota "neyman".
        dropped: bool [N], rows that are in no size and never kept, e.g. duplicates.
        num_samples: that settings.keep is a share of; N by default.
    """
    k = int(labels.max()) + 1
    by_id = np.argsort(np.asarray(ids), kind="stable")
    counted = np.ones(len(labels), dtype=bool) if dropped is None else ~dropped
    sizes = np.bincount(labels[counted], minlength=k)
    pool = pool_of(labels, distances, by_id, counted, settings.trim)
    outermost_first = by_id[np.lexsort((-distances[by_id], labels[by_id]))]
    available = np.bincount(labels[pool], minlength=k)
    counts = quota_counts(
        sizes, available, quota=settings.quota, ratio=settings.ratio, keep=settings.keep, spreads=spreads,
        num_samples=len(labels) if num_samples is None else num_samples,
    )
    smallest = int(available.min())
    if settings.quota == "equal" and k * smallest < _SMALL_SHARE * sizes.sum():
        warnings.warn(
            f"cluster {int(available.argmin())} has {smallest} of {sizes.sum()} samples, so at most "
            f"{k * smallest / sizes.sum():.1%} can be kept: raise selection.min_fraction (a lower bound on the "
            "cluster sizes), use fewer clusters, or selection.quota proportional",
            stacklevel=2,
        )
    weights = cluster_weights(sizes, counts)[labels] if settings.weighting != "none" else np.ones(len(labels))
    if settings.choice == "random":
        return Selection(draw(labels, by_id, pool, counts, settings.seed, 0), pool, weights, counts)
    among = pool
    if settings.balance == "random_first":
        among = draw(labels, by_id, pool, np.full(k, smallest), settings.seed, 0)
    order = outermost_first if settings.choice == "peripheral" else by_id[np.lexsort((distances[by_id], labels[by_id]))]
    order = order[among[order]]
    of = labels[order]
    place = np.arange(len(order)) - np.searchsorted(of, np.arange(k))[of]
    kept = np.zeros(len(labels), dtype=bool)
    kept[order[place < counts[of]]] = True
    return Selection(kept, pool, weights, counts)
