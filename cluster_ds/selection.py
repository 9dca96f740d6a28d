"""Stage 5: labels and distances -> which samples are kept, and their weights in the loss.

Shapes: N samples, K clusters. Source: arXiv 2609.12584, sections 4.2 and 4.3.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

_BLOCK = 4096  # rows converted to float64 at a time
_SMALL_SHARE = 0.3  # warn when the smallest cluster limits the selection to less than this


@dataclass(frozen=True)
class Selection:
    """What `select` returns.

    Attributes:
        kept: bool [N].
        weights: float64 [N], the weight of each sample in the loss, also of those that are not kept.
        quota: k, samples kept of every cluster.
    """

    kept: np.ndarray
    weights: np.ndarray
    quota: int


def cluster_weights(sizes: np.ndarray) -> np.ndarray:
    """Weight each cluster so that balanced batches keep the full data's mean gradient.

    Args:
        sizes: int64 [K], samples per cluster before balancing.

    Returns:
        float64 [K], w_c = |C_c| K / N; the mean over clusters is 1.

    Raises:
        ValueError: if a cluster is empty.
    Source: arXiv 2609.12584, section 4.3.
    """
    sizes = np.asarray(sizes)
    if (sizes <= 0).any():
        raise ValueError(f"cluster {int(np.argmin(sizes))} is empty: sizes {sizes.tolist()}")
    return sizes * len(sizes) / sizes.sum()


def quota_per_cluster(sizes: np.ndarray, ratio: float | None, keep: float | None) -> int:
    """k, the number of samples kept of every cluster.

    Args:
        sizes: int64 [K].
        ratio: r in (0, 1], k = max(1, floor(r n_min)); used when `keep` is None, 1 by default.
        keep: a budget as a share of all N samples instead.

    Raises:
        ValueError: if the budget is more than equal parts of the smallest cluster can give.
    """
    smallest, total, k = int(sizes.min()), int(sizes.sum()), len(sizes)
    if ratio is not None and keep is not None:
        raise ValueError(f"ratio ({ratio}) and keep ({keep}) both set the budget: give one of them")
    for name, share in (("ratio", ratio), ("keep", keep)):
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"{name} {share} is outside (0, 1]")
    if keep is None:
        return max(1, int(np.floor((1.0 if ratio is None else ratio) * smallest + 1e-9)))
    quota = max(1, int(np.floor(keep * total / k + 1e-9)))
    if quota > smallest:
        most = int(1000 * k * smallest / total) / 1000
        raise ValueError(
            f"selection.keep {keep:g} needs {quota} samples of every cluster, but cluster {int(sizes.argmin())} has "
            f"{smallest}: at most {most} can be kept with sizes {sizes.tolist()}; lower keep, raise selection.min_fraction, "
            "or use fewer clusters"
        )
    return quota


def select(
    labels: np.ndarray, distances: np.ndarray, ids: list[str] | np.ndarray, *, choice: str = "peripheral",
    balance: str = "whole", ratio: float | None = None, keep: float | None = None, weighting: str = "cluster",
    seed: int = 0,
) -> Selection:
    """Keep the same number of samples of every cluster.

    Args:
        labels: int64 [N], every cluster occurs.
        distances: float64 [N], to the own centroid.
        ids: N sample ids; they break ties and key the random draws, so the order of the rows does not matter.
        choice: "peripheral" keeps the farthest, "core" the nearest, "random" any.
        balance: "whole" chooses from the whole cluster, "random_first" cuts every cluster to n_min at random before.
        ratio, keep: see `quota_per_cluster`.
        weighting: "cluster" for w_c = |C_c| K / N, "none" for 1.
        seed: of the random draws.
    """
    if choice not in ("peripheral", "random", "core"):
        raise ValueError(f"choice {choice!r}: peripheral, random or core")
    if balance not in ("whole", "random_first"):
        raise ValueError(f"balance {balance!r}: whole or random_first")
    if weighting not in ("cluster", "none"):
        raise ValueError(f"weighting {weighting!r}: cluster or none")
    sizes = np.bincount(labels)
    quota = quota_per_cluster(sizes, ratio, keep)
    smallest = int(sizes.min())
    if len(sizes) * smallest < _SMALL_SHARE * len(labels):
        warnings.warn(
            f"cluster {int(sizes.argmin())} has {smallest} of {len(labels)} samples, so at most "
            f"{len(sizes) * smallest / len(labels):.1%} can be kept: raise selection.min_fraction (a lower bound on the "
            "cluster sizes) or use fewer clusters",
            stacklevel=2,
        )
    ids = np.asarray(ids)
    kept = np.zeros(len(labels), dtype=bool)
    for c in range(len(sizes)):
        members = np.flatnonzero(labels == c)
        members = members[np.argsort(ids[members])]
        if balance == "random_first" or choice == "random":
            shuffled = members[np.random.default_rng((seed, 2, c)).permutation(len(members))]
            members = shuffled[:smallest] if balance == "random_first" else shuffled
        if choice != "random":
            by_id = np.argsort(ids[members])
            sign = -1.0 if choice == "peripheral" else 1.0
            members = members[by_id][np.argsort(sign * distances[members[by_id]], kind="stable")]
        kept[members[:quota]] = True
    weights = cluster_weights(sizes)[labels] if weighting == "cluster" else np.ones(len(labels))
    return Selection(kept, weights, quota)


def selection_bias(features: np.ndarray, selection: Selection, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """How far the mean that training sees lies from the full data's.

    Args:
        features: float [N, H].
        selection: what is kept, with the weights it is trained with.
        labels: int64 [N].
    Returns:
        ||sum w_i g_i / sum w_i - mu|| / ||mu|| over kept i, and float64 [K], the cosine of kept and full cluster means.
    """
    k, kept = int(labels.max()) + 1, selection.kept
    groups = np.arange(k)[:, None] == labels  # bool [K, N]
    rows = np.concatenate([np.ones((1, len(labels))), (kept * selection.weights)[None], groups, groups & kept])
    sums = np.zeros((len(rows), features.shape[1]))
    for start in range(0, len(labels), _BLOCK):
        block = slice(start, start + _BLOCK)
        sums += rows[:, block] @ features[block].astype(np.float64)
    mean, seen = sums[0] / len(labels), sums[1] / rows[1].sum()
    full, chosen = sums[2 : 2 + k], sums[2 + k :]
    lengths = np.linalg.norm(full, axis=1) * np.linalg.norm(chosen, axis=1)
    cosines = (full * chosen).sum(axis=1) / np.maximum(lengths, 1e-300)
    return float(np.linalg.norm(seen - mean) / max(float(np.linalg.norm(mean)), 1e-300)), cosines
