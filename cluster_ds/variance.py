"""Stage 5a: what the selection does to the mean gradient and to its variance, from the proxies.

One pass over the features gives the sums of every cluster; everything here follows from them. Variances are of the proxies
before normalisation, since that is what an update sees, as the sum over their coordinates. With pi_c = |C_c| / N, S_c^2 the
variance inside cluster c and samples drawn at random inside clusters, the weighted mean of a batch of B has

    random               (sum_c pi_c S_c^2 + S_inter^2) / B
    quotas n_c           (1/B) sum_c pi_c^2 S_c^2 M / n_c
      equal              (K/B) sum_c pi_c^2 S_c^2
      proportional       (1/B) sum_c pi_c S_c^2, never above random's
      neyman             (1/B) (sum_c pi_c S_c)^2, the least of all.

Source: arXiv 2609.12584, section 3, for the first two; the others are stratified sampling's classics. Shapes: N samples, K
clusters, H features, q sets of weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from .features import Points
from .selection import QUOTAS, quota_counts


def cluster_sums(points: Points, labels: np.ndarray, num_clusters: int, weights: np.ndarray) -> np.ndarray:
    """float64 [q, K, H], each cluster's sum of its points under q sets of weights float64 [q, N]."""
    k = num_clusters

    def sums(span: slice, block: torch.Tensor, _: torch.Tensor) -> np.ndarray:
        size = span.stop - span.start
        rows = np.zeros((len(weights), k, size))
        rows[:, labels[span], np.arange(size)] = weights[:, span]
        on_device = torch.from_numpy(rows.reshape(-1, size)).to(points.device, points.dtype)
        return (on_device @ block).double().cpu().numpy()

    total = np.zeros((len(weights) * k, points.dim))
    for _, part in points.map_blocks(sums):
        total += part
    return total.reshape(len(weights), k, points.dim)


@dataclass(frozen=True)
class Moments:
    """Of the clusters' proxies before normalisation.

    Attributes:
        sizes: int64 [K].
        means: float64 [K, H].
        variances: float64 [K], S_c^2, the mean squared distance to the mean.
    """

    sizes: np.ndarray
    means: np.ndarray
    variances: np.ndarray

    @property
    def shares(self) -> np.ndarray:
        """float64 [K], pi_c."""
        return self.sizes / self.sizes.sum()

    @property
    def mean(self) -> np.ndarray:
        """float64 [H], of all samples."""
        return self.shares @ self.means

    @property
    def between(self) -> float:
        """S_inter^2."""
        return float(self.shares @ ((self.means - self.mean) ** 2).sum(axis=1))

    @classmethod
    def of(cls, sums: np.ndarray, sizes: np.ndarray, squares: np.ndarray) -> Moments:
        """From sums float64 [K, H] and the sums of squared lengths float64 [K]."""
        counts = np.maximum(sizes, 1)
        means = sums / counts[:, None]
        return cls(sizes, means, np.maximum(squares / counts - (means**2).sum(axis=1), 0.0))


def batch_variances(moments: Moments, pool: Moments, num_kept: int) -> dict[str, float | None]:
    """B times the predicted variance of a batch's weighted mean proxy at the same budget; None where it cannot be had.

    Args:
        moments: of whole clusters.
        pool: of what may be kept of them.
        num_kept: M.
    """
    out: dict[str, float | None] = {"random": float(moments.shares @ moments.variances) + moments.between}
    for quota in QUOTAS:
        try:
            counts = quota_counts(
                moments.sizes, pool.sizes, quota=quota, keep=num_kept / moments.sizes.sum(), spreads=np.sqrt(pool.variances)
            )
        except ValueError:
            out[quota] = None
            continue
        out[quota] = quota_variance(moments.shares, pool.variances, counts)
    return out


def quota_variance(shares: np.ndarray, variances: np.ndarray, counts: np.ndarray) -> float:
    """B times the variance with n_c samples of each cluster kept: pi_c, S_c^2 and n_c [K] of each."""
    return float((shares**2 * variances * counts.sum() / counts).sum())


def finite_batch_variance(moments: Moments, in_batch: np.ndarray) -> float:
    """Variance of (1/B) sum_i w_i g_i for one batch of b_c different samples of each cluster, w = pi_c B / b_c.

    Every b_c is at least 1. Exact for samples drawn without replacement: the mean of b_c of them has the variance
    S_c^2 (|C_c| - b_c) / (b_c (|C_c| - 1)).
    """
    sizes = moments.sizes
    left = (sizes - in_batch) / np.maximum(sizes - 1, 1)
    return float((moments.shares**2 * moments.variances / in_batch * left).sum())


def simulate(
    gradients: np.ndarray, batches: Iterable[tuple[np.ndarray, np.ndarray]]
) -> tuple[float, float]:
    """Mean squared error of batches' weighted means about the full mean, and its standard error.

    Args:
        gradients: float [N, H], e.g. proxies times their norms.
        batches: rows int64 [B] and weights float64 [B] of each batch.
    """
    mean = gradients.mean(axis=0, dtype=np.float64)
    errors = np.array([((weights @ gradients[rows] / len(rows) - mean) ** 2).sum() for rows, weights in batches])
    return float(errors.mean()), float(errors.std(ddof=1) / np.sqrt(len(errors)))


@dataclass(frozen=True)
class Bias:
    """How far the mean that training sees lies from the full data's.

    Attributes:
        relative_shift: ||weighted mean of what is kept - mean|| / ||mean||, of unit proxies.
        cosines: float64 [K], of the weighted means of what is kept and the whole clusters'.
        squared: the squared shift of proxies before normalisation, to be set beside a batch's variance.
        variance: B times the variance of a batch of what is kept: sum_c (n_c / M) Var_c(w_i g_i) over the kept samples,
            which is K sum_c pi_c^2 S_c^2 for the paper's weights.
    """

    relative_shift: float
    cosines: np.ndarray
    squared: float
    variance: float


def selection_bias(
    points: Points, labels: np.ndarray, kept: np.ndarray, weights: np.ndarray, counted: np.ndarray, factors: np.ndarray,
    squares: np.ndarray,
) -> Bias:
    """Measure the bias and variance of a selection, in one pass.

    Args:
        points: the proxies [N, H].
        labels: int64 [N].
        kept: bool [N].
        weights: float64 [N], as in the loss.
        counted: bool [N], what the full data are: all but dropped rows.
        factors: float64 [N], from points to proxies before normalisation.
        squares: float64 [N], squared lengths of the latter.
    """
    k = int(labels.max()) + 1
    full, seen = counted.astype(np.float64), kept * weights
    sums = cluster_sums(points, labels, k, np.stack([full, seen, full * factors, seen * factors]))
    lengths = np.linalg.norm(sums[0], axis=1) * np.linalg.norm(sums[1], axis=1)
    cosines = (sums[0] * sums[1]).sum(axis=1) / np.maximum(lengths, 1e-300)
    mean, seen_mean = sums[0].sum(axis=0) / full.sum(), sums[1].sum(axis=0) / seen.sum()
    raw_mean, raw_seen = sums[2].sum(axis=0) / full.sum(), sums[3].sum(axis=0) / seen.sum()
    weighted = Moments.of(sums[3], np.bincount(labels[kept], minlength=k), np.bincount(labels, seen**2 * squares, k))
    return Bias(
        relative_shift=float(np.linalg.norm(seen_mean - mean) / max(float(np.linalg.norm(mean)), 1e-300)), cosines=cosines,
        squared=float(((raw_seen - raw_mean) ** 2).sum()), variance=float(weighted.shares @ weighted.variances),
    )


def effective_sample_size(weights: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2): 1 for equal weights."""
    return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))
