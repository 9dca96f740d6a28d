"""Stage 5b: weights inside a cluster under which the kept samples' mean proxy is the whole cluster's. Ours.

The peripheral choice moves a cluster's mean. For its m kept proxies g_i and the whole cluster's mean mu, the weights are

    min over w >= 0 of  1/2 || mu - (1/m) sum_i w_i g_i ||^2 + (ridge / 2m) sum_i (w_i - 1)^2,

non-negative least squares with a ridge towards 1. Its optimum has the form w_i = max(0, 1 + g_i u) with u in R^H, the
minimum of a smooth convex function (scipy's L-BFGS): the m weights are never solved for, and the proxies are read block by
block. A constant coordinate is added to every proxy, which holds the weights' mean at 1. A small ridge leaves little bias,
but weights that differ more: it is made as small as a bound on the effective sample size allows. In survey sampling this
is calibration by a truncated linear distance (Deville and Saerndal 1992). Shapes: m kept samples, H features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize

from .features import Points
from .variance import effective_sample_size

_LEAST_RIDGE, _GREATEST_RIDGE = 1e-7, 1e2
_BISECTIONS = 6
_ITERATIONS = 200


@dataclass(frozen=True)
class Calibration:
    """Weights of one cluster's kept samples.

    Attributes:
        weights: float64 [m], non-negative, of mean 1.
        ridge: that they were found with.
        effective_sample_size: (sum w)^2 / (m sum w^2).
    """

    weights: np.ndarray
    ridge: float
    effective_sample_size: float


def calibrate(points: Points, mean: np.ndarray, min_effective: float) -> Calibration:
    """The least biased weights whose effective sample size is at least `min_effective`.

    Args:
        points: the kept proxies [m, H] of one cluster.
        mean: float64 [H], of the whole cluster.
        min_effective: in (0, 1].
    """
    u = np.zeros(len(mean) + 1)
    best = Calibration(np.ones(len(points)), np.inf, 1.0)
    low, high = np.log(_LEAST_RIDGE), np.log(_GREATEST_RIDGE)
    middle = np.log(1e-2)
    for _ in range(_BISECTIONS):
        found, ahead = calibrate_at(points, mean, float(np.exp(middle)), u)
        if found.effective_sample_size >= min_effective:
            best, u, high = found, ahead, middle
        else:
            low = middle
        middle = (low + high) / 2
    return best


def calibrate_at(
    points: Points, mean: np.ndarray, ridge: float, start: np.ndarray | None = None
) -> tuple[Calibration, np.ndarray]:
    """The weights of one ridge, and u float64 [H + 1] to start another one from."""
    target = np.append(mean, 1.0)
    m = len(points)
    weights = np.empty(m)

    def objective(u: np.ndarray) -> tuple[float, np.ndarray]:
        along = torch.tensor(u[:-1], dtype=points.dtype, device=points.device)

        def work(_: slice, block: torch.Tensor, __: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
            w = (1.0 + block @ along + u[-1]).clamp_(min=0.0)
            return w.double().cpu().numpy(), (w @ block).double().cpu().numpy()

        pull = np.zeros(len(mean))
        for span, (part, toward) in points.map_blocks(work):
            weights[span] = part
            pull += toward
        value = 0.5 * ridge * (u @ u) - target @ u + 0.5 * (weights @ weights) / m
        return float(value), ridge * u - target + np.append(pull, weights.sum()) / m

    found = minimize(
        objective, np.zeros(len(target)) if start is None else start, jac=True, method="L-BFGS-B",
        options={"maxiter": _ITERATIONS, "ftol": 1e-12, "gtol": 1e-7},
    )
    objective(found.x)
    total = weights.sum()
    scaled = weights * (m / total) if total > 0 else np.ones(m)
    return Calibration(scaled, ridge, effective_sample_size(scaled)), found.x
