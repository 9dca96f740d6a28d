"""Stage 5b: weights of the kept samples under which their mean proxy is the full data's, and each cluster's its own. Ours.

The peripheral choice moves the means. With C_i = g_i - mu_c the kept proxies about their whole cluster's mean, a_i = pi_c /
m_c, and r_c = sum over i in c of w_i C_i / m_c what is left of cluster c's shift, the weights are

    min over w >= 0 of  || sum_c pi_c r_c ||^2 + tau sum_c pi_c || r_c ||^2 + ridge sum_i a_i (w_i - 1)^2,

non-negative least squares with a ridge towards 1, with sum w_i = m_c in every cluster. Its optimum has the form
w_i = max(0, 1 + b_c + C_i (v + v_c)), where b, v and v_c, (K + 1) H + K numbers, minimise a smooth convex function (scipy's
L-BFGS): the weights themselves are never unknowns, and the proxies are read block by block where they are many. A small
ridge leaves little bias, but weights that differ more: it is made as small as a bound on the effective sample size allows.
In survey sampling this is calibration with a truncated linear distance (Deville and Saerndal 1992). Shapes: M kept samples,
m_c of cluster c, K clusters, H features. C_i is divided by the root of its mean square, so that the ridge means the same in
any unit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

from .features import Points
from .variance import effective_sample_size

_OWN = 0.1  # tau: what a cluster's own mean counts beside the mean of all
_MASS = 100.0  # how firmly a cluster's weights are held at their sum, which is then made exact
_LEAST_RIDGE, _FIRST_RIDGE, _GREATEST_RIDGE = 1e-6, 1e-2, 1e2
_BISECTIONS = 8
_ITERATIONS = 300
_CLOSE_ENOUGH = 0.01  # above the bound on the effective sample size
_HELD = 1 << 25  # elements that are kept in memory; more are read again for every evaluation


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` returns.

    Attributes:
        weights: float64 [M], non-negative, of mean 1 in every cluster.
        ridge: that they were found with; infinite for weights of 1.
        effective_sample_size: (sum w)^2 / (M sum w^2).
    """

    weights: np.ndarray
    ridge: float
    effective_sample_size: float


def calibrate(
    points: Points, labels: np.ndarray, means: np.ndarray, shares: np.ndarray, min_effective: float
) -> Calibration:
    """The least biased weights whose effective sample size is at least `min_effective`.

    Args:
        points: the kept proxies [M, H].
        labels: int64 [M].
        means: float64 [K, H], of whole clusters.
        shares: float64 [K], pi_c.
        min_effective: in (0, 1].
    """
    problem = _Problem(points, labels, means, shares)
    best = Calibration(np.ones(len(points)), np.inf, 1.0)
    start = np.zeros(problem.num_unknowns)
    low, middle, high = (float(np.log(r)) for r in (_LEAST_RIDGE, _FIRST_RIDGE, _GREATEST_RIDGE))
    for _ in range(_BISECTIONS):
        found, ahead = problem.solve(float(np.exp(middle)), start)
        if found.effective_sample_size >= min_effective:
            best, start, high = found, ahead, middle
            if found.effective_sample_size < min_effective + _CLOSE_ENOUGH:
                break
        else:
            low = middle
        middle = (low + high) / 2
    if not np.isfinite(best.ridge):
        warnings.warn(
            f"no calibrated weights have an effective sample size of {min_effective} or more, so none are used: lower "
            "selection.min_effective",
            stacklevel=2,
        )
    return best


def bytes_needed(num_points: int, dim: int, num_clusters: int) -> int:
    """Memory that the calibration of at most so many samples takes: what is held of them, and L-BFGS's vectors."""
    return 8 * min(num_points * dim, _HELD) + 25 * 8 * ((num_clusters + 1) * dim + num_clusters)


class _Problem:
    """The dual at any ridge; unknowns are b [K], v [H] and v_c [K, H], one behind the other."""

    def __init__(self, points: Points, labels: np.ndarray, means: np.ndarray, shares: np.ndarray):
        self.points, self.labels, self.shares = points, labels, shares
        self.k, self.dim = means.shape
        self.of_row = torch.from_numpy(labels).to(points.device)
        self.means = torch.tensor(means, dtype=points.dtype, device=points.device)
        self.amounts = (shares / np.bincount(labels, minlength=self.k))[labels]
        self.num_unknowns = self.k + (self.k + 1) * self.dim
        self.held: torch.Tensor | None = None
        self.scale = 1.0
        squares = sum(float(part) for _, part in self.points.map_blocks(self._square_of_centred))
        self.scale = 1.0 / max(float(np.sqrt(squares / len(points))), 1e-300)
        if len(points) * self.dim <= _HELD:
            self.held = torch.empty(len(points), self.dim, dtype=points.dtype, device=points.device)
            for span, block in self.points.map_blocks(lambda span, x, spare: self._centred(span, x, spare).clone()):
                self.held[span] = block

    def _centred(self, span: slice, block: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
        """C_i of a block, in its place."""
        return block.sub_(torch.index_select(self.means, 0, self.of_row[span], out=spare)).mul_(self.scale)

    def _square_of_centred(self, span: slice, block: torch.Tensor, spare: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(self._centred(span, block, spare), dtype=torch.float64)) ** 2

    def solve(self, ridge: float, start: np.ndarray) -> tuple[Calibration, np.ndarray]:
        """The weights of one ridge, and the unknowns to start the next from."""
        found = minimize(
            self._objective, start, args=(ridge,), jac=True, method="L-BFGS-B",
            options={"maxiter": _ITERATIONS, "ftol": 1e-11, "gtol": 1e-7},
        )
        weights = self._evaluate(found.x)[0]
        total = np.bincount(self.labels, weights, self.k)
        count = np.bincount(self.labels, minlength=self.k)
        scaled = np.where(total[self.labels] > 0, weights * (count / np.maximum(total, 1e-300))[self.labels], 1.0)
        return Calibration(scaled, ridge, effective_sample_size(scaled)), found.x

    def _objective(self, x: np.ndarray, ridge: float) -> tuple[float, np.ndarray]:
        b, v, own = self._split(x)
        weights, pulls = self._evaluate(x)
        masses = np.bincount(self.labels, self.amounts * weights, self.k)
        value = (
            0.5 * ridge * (v @ v + self.shares @ (own**2).sum(axis=1) / _OWN + self.shares @ b**2 / _MASS)
            - self.shares @ b + 0.5 * self.amounts @ weights**2
        )
        slopes = (
            masses - self.shares + ridge / _MASS * self.shares * b, ridge * v + pulls.sum(axis=0),
            (ridge / _OWN * self.shares[:, None] * own + pulls).ravel(),
        )
        return float(value), np.concatenate(slopes)

    def _split(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        k, dim = self.k, self.dim
        return x[:k], x[k : k + dim], x[k + dim :].reshape(k, dim)

    def _evaluate(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The weights [M], and sum_i a_i w_i C_i of each cluster [K, H]."""
        b, v, own = self._split(x)
        like: dict[str, Any] = {"dtype": self.points.dtype, "device": self.points.device}
        directions, base = torch.tensor((v + own).T, **like), torch.tensor(1.0 + b, **like)
        amounts = torch.from_numpy(self.amounts).to(**like)

        def work(span: slice, centred: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
            mine = self.of_row[span]
            along = (centred @ directions).gather(1, mine[:, None])[:, 0]
            w = (base[mine] + along).clamp_(min=0.0)
            rows = torch.zeros(self.k, len(mine), **like)
            rows[mine, torch.arange(len(mine), device=mine.device)] = w * amounts[span]
            return w.double().cpu().numpy(), (rows @ centred).double().cpu().numpy()

        def blocks() -> Iterator[tuple[slice, tuple[np.ndarray, np.ndarray]]]:
            if self.held is not None:
                everything = slice(0, len(self.points))
                yield everything, work(everything, self.held)
                return

            def centre(span: slice, block: torch.Tensor, spare: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
                return work(span, self._centred(span, block, spare))

            yield from self.points.map_blocks(centre)

        weights, pulls = np.empty(len(self.points)), np.zeros((self.k, self.dim))
        for span, (part, pull) in blocks():
            weights[span] = part
            pulls += pull
        return weights, pulls
