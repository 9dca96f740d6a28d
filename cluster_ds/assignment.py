"""Stage 4a: exact assignment of N points to K clusters with bounds lo_c <= |C_c| <= hi_c.

    minimise  sum_i D[i, a_i]   subject to the bounds

is a transportation problem, so it has an integral optimum and a dual with one price per cluster:

    max_p  sum_i min_c (D_ic + p_c) - sum_c (hi_c max(p_c, 0) + lo_c min(p_c, 0)).

Two steps: the dual with a smoothed minimum gives prices that are nearly right (scipy's L-BFGS-B, one variable a side of
each price); shortest augmenting paths on the graph of K clusters and one sink then finish exactly. The returned gap is
(primal - dual) / primal, a certificate that needs no trust in either step. The method is ours; the oracle in the tests
is scipy's linprog.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

# Temperatures of the smoothed minimum, as shares of the costs' standard deviation.
_COLD, _WARM = (0.3, 0.075, 0.02, 0.005), (0.005,)
_FINAL = (1e-3, 2e-4)
_SAMPLE = 20_000  # rows that find the rough prices
_COUNT_ERROR = 0.3  # points; what is left is repaired exactly


@dataclass(frozen=True)
class Assignment:
    """An optimal assignment.

    Attributes:
        labels: int64 [N].
        prices: float64 [K], > 0 where the upper bound binds, < 0 where the lower one does.
        cost: sum of the assigned costs.
        gap: (cost - dual bound) / cost; rounding alone, about 1e-15.
        num_moved: points that are not in their cheapest cluster.
    """

    labels: np.ndarray
    prices: np.ndarray
    cost: float
    gap: float
    num_moved: int


def assign(costs: np.ndarray, lo: np.ndarray, hi: np.ndarray, prices: np.ndarray | None = None) -> Assignment:
    """Assign every point at least total cost within the bounds.

    Args:
        costs: float [N, K], finite.
        lo: int [K], least sizes.
        hi: int [K], greatest sizes.
        prices: float64 [K], a warm start from a similar problem.

    Raises:
        ValueError: for costs that are not finite, or bounds that no assignment can meet.
    """
    costs = np.asarray(costs, dtype=np.float64)
    lo, hi = np.asarray(lo, dtype=np.int64), np.asarray(hi, dtype=np.int64)
    num_points = len(costs)
    if not np.isfinite(costs).all():
        raise ValueError(f"{np.count_nonzero(~np.isfinite(costs).all(axis=1))} of {num_points} rows have infinite costs")
    if not (np.all(lo <= hi) and lo.sum() <= num_points <= hi.sum()):
        raise ValueError(
            f"sizes between {lo.tolist()} and {hi.tolist()} cannot hold {num_points} points "
            f"(the bounds allow {lo.sum()} to {hi.sum()})"
        )
    labels = costs.argmin(axis=1)
    counts = np.bincount(labels, minlength=len(lo))
    p = np.zeros(len(lo))
    if not (np.all(counts >= lo) and np.all(counts <= hi)):
        p = _repair(costs, _smoothed_prices(costs, lo, hi, prices), lo, hi, labels)
    rows = np.arange(num_points)
    cost = float(costs[rows, labels].sum())
    dual = float((costs + p).min(axis=1).sum() - hi @ np.maximum(p, 0) - lo @ np.minimum(p, 0))
    num_moved = int(np.count_nonzero(costs[rows, labels] > costs.min(axis=1)))
    return Assignment(labels, p, cost, (cost - dual) / abs(cost) if cost else cost - dual, num_moved)


def _smoothed_prices(costs: np.ndarray, lo: np.ndarray, hi: np.ndarray, warm: np.ndarray | None) -> np.ndarray:
    """Near-optimal prices: maximise the smoothed dual at falling temperatures, on a sample first."""
    scale = float(costs.std())
    if scale == 0.0:
        return np.zeros(costs.shape[1])
    costs = (costs - costs.min(axis=1, keepdims=True)) / scale  # a constant per row changes no assignment
    stride = max(1, len(costs) // _SAMPLE)
    sample, share = costs[::stride], len(costs[::stride]) / len(costs)
    p = np.zeros(costs.shape[1]) if warm is None else warm / scale
    for level in _COLD if warm is None else _WARM:
        p = _maximise_dual(sample, lo * share, hi * share, p, level)
    for level in _FINAL:
        p = _maximise_dual(costs, lo, hi, p, level)
    return p * scale


def _maximise_dual(costs: np.ndarray, lo: np.ndarray, hi: np.ndarray, p: np.ndarray, eps: float) -> np.ndarray:
    """One temperature; costs above their row's minimum, in standard deviations.

    The two halves of each price are non-negative variables, so that the kink at 0 is a bound. They are counted in
    temperatures: L-BFGS-B measures convergence by the lesser of gradient and distance to a bound, in the variables' unit.
    """
    k = costs.shape[1]

    def negative_dual(x: np.ndarray) -> tuple[float, np.ndarray]:
        z = (costs / eps + (x[:k] - x[k:])) * -1.0
        top = z.max(axis=1, keepdims=True)
        np.exp(z - top, out=z)
        total = z.sum(axis=1, keepdims=True)
        z /= total
        counts = z.sum(axis=0)
        value = -(np.log(total) + top).sum() - hi @ x[:k] + lo @ x[k:]
        return -value, np.concatenate([hi - counts, counts - lo])

    # No useful price exceeds the costs' range; the bound stops a drift where equal shifts of all prices change nothing.
    limit = float(costs.max()) / eps
    start = np.minimum(np.concatenate([np.maximum(p, 0), np.maximum(-p, 0)]) / eps, limit)
    found = minimize(
        negative_dual, start, jac=True, method="L-BFGS-B", bounds=[(0, limit)] * (2 * k),
        options={"maxiter": 100, "ftol": 1e-14, "gtol": _COUNT_ERROR},
    )
    return (found.x[:k] - found.x[k:]) * eps


def _repair(costs: np.ndarray, p: np.ndarray, lo: np.ndarray, hi: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Make the assignment exactly optimal, in place; returns the prices that certify it.

    `labels` becomes argmin(D + p), which is optimal for its own counts. Flow on the arcs cluster -> sink is set by
    complementary slackness (hi where p > 0, lo where p < 0), and the imbalance that remains is sent along shortest
    paths in reduced costs. Node K is the sink. A push takes whole groups of equal reduced cost at once.
    """
    num_points, k = costs.shape
    p = np.append(p, 0.0)
    labels[:] = (costs + p[:k]).argmin(axis=1)
    counts = np.bincount(labels, minlength=k)
    flow = np.where(p[:k] > 0, hi, np.where(p[:k] < 0, lo, np.clip(counts, lo, hi)))
    excess = np.append(counts - flow, flow.sum() - num_points)
    move = np.full((k, k), np.inf)  # move[u, v]: the cheapest D_iv - D_iu of a point i in u
    for u in range(k):
        _cheapest_moves(costs, labels, u, move)
    while excess.any():
        reduced = np.full((k + 1, k + 1), np.inf)
        reduced[:k, :k] = np.maximum(move + p[:k] - p[:k, None], 0.0)
        reduced[:k, k] = np.where(flow < hi, np.maximum(p[k] - p[:k], 0.0), np.inf)
        reduced[k, :k] = np.where(flow > lo, np.maximum(p[:k] - p[k], 0.0), np.inf)
        distance, parent = _dijkstra(reduced, np.flatnonzero(excess > 0))
        deficits = np.flatnonzero(excess < 0)
        end = int(deficits[distance[deficits].argmin()])
        path = [end]
        while parent[path[-1]] >= 0:
            path.append(int(parent[path[-1]]))
        path.reverse()
        p -= np.minimum(distance, distance[end])
        _push(costs, labels, flow, excess, move, path, lo, hi)
    return p[:k] - p[k]


def _push(
    costs: np.ndarray, labels: np.ndarray, flow: np.ndarray, excess: np.ndarray, move: np.ndarray,
    path: list[int], lo: np.ndarray, hi: np.ndarray,
) -> None:
    """Send as much as fits along one path."""
    k = len(flow)
    amount = int(min(excess[path[0]], -excess[path[-1]]))
    groups = []
    for u, v in zip(path, path[1:], strict=False):
        if v == k:
            amount = min(amount, int(hi[u] - flow[u]))
        elif u == k:
            amount = min(amount, int(flow[v] - lo[v]))
        else:
            members = np.flatnonzero(labels == u)
            ties = members[costs[members, v] - costs[members, u] == move[u, v]]
            groups.append((v, ties))
            amount = min(amount, len(ties))
    for v, ties in groups:
        labels[ties[:amount]] = v
    for u, v in zip(path, path[1:], strict=False):
        if v == k:
            flow[u] += amount
        elif u == k:
            flow[v] -= amount
    excess[path[0]] -= amount
    excess[path[-1]] += amount
    for u in path:
        if u < k:
            _cheapest_moves(costs, labels, u, move)


def _cheapest_moves(costs: np.ndarray, labels: np.ndarray, u: int, move: np.ndarray) -> None:
    members = costs[labels == u]
    move[u] = (members - members[:, u : u + 1]).min(axis=0) if len(members) else np.inf
    move[u, u] = np.inf


def _dijkstra(weights: np.ndarray, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distances and parents from a set of sources on a small dense graph."""
    n = len(weights)
    distance, parent, done = np.full(n, np.inf), np.full(n, -1), np.zeros(n, dtype=bool)
    distance[sources] = 0.0
    for _ in range(n):
        u = int(np.where(done, np.inf, distance).argmin())
        if done[u] or not np.isfinite(distance[u]):
            break
        done[u] = True
        through = distance[u] + weights[u]
        better = ~done & (through < distance)
        distance[better], parent[better] = through[better], u
    return distance, parent
