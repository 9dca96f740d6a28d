"""Stage 4a: exact assignment of N points to K clusters with bounds lo_c <= |C_c| <= hi_c.

    minimise  sum_i D[i, a_i]   subject to the bounds

is a transportation problem, so it has an integral optimum and a dual with one price per cluster:

    max_p  sum_i min_c (D_ic + p_c) - sum_c (hi_c max(p_c, 0) + lo_c min(p_c, 0)).

Three steps. Newton's method on the dual with a smoothed minimum gives nearly right prices from a sample. Under these
prices only the points whose two cheapest clusters are nearly even, a narrow band, can still change: Newton at low
temperatures and shortest augmenting paths on the graph of K clusters and one sink solve the band exactly, the rest is held.
It is held rightly if no two prices have moved against each other by more than the band's width; else the band is widened.
The returned gap is (primal - dual) / primal over all points, a certificate that needs no trust in any step. The method is
ours; the oracles in the tests are scipy's linprog and OR-tools' flow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Temperatures of the smoothed minimum, as shares of the costs' standard deviation.
_ROUGH, _FINE = (0.3, 0.075, 0.02, 0.005), (0.075, 1e-3)  # of the rough prices; first and last of the exact ones
_SAMPLE = 3072  # rows that find the rough prices; more for many clusters
_FINER = 6  # each further sample is so many times larger
_BAND = 3072  # points that are solved exactly at first
_BAND_PER_ERROR = 4  # and so many at a cluster for each point that it has too many or too few
_WARM_ERROR = 0.02  # of the points: prices that are off by less need no sample
_COUNT_ERROR = 0.3  # points; what is left is repaired exactly
_NEWTON_STEPS = 50
_REACH = 20  # temperatures that a price may move in one step


@dataclass(frozen=True)
class Assignment:
    """An optimal assignment.

    Attributes:
        labels: int64 [N].
        prices: float64 [K], > 0 where the upper bound binds, < 0 where the lower one does.
        cost: sum of the assigned costs.
        gap: (cost - dual bound) / cost; rounding alone, about 1e-15.
        num_moved: points that are not in their cheapest cluster.
        cheapest_sizes: int64 [K], what the sizes would be without bounds.
    """

    labels: np.ndarray
    prices: np.ndarray
    cost: float
    gap: float
    num_moved: int
    cheapest_sizes: np.ndarray


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
    rows = np.arange(num_points)
    least = costs[rows, labels]
    counts = np.bincount(labels, minlength=len(lo))
    if np.all(counts >= lo) and np.all(counts <= hi):
        return Assignment(labels, np.zeros(len(lo)), float(least.sum()), 0.0, 0, counts)
    labels, p = _solve(costs, lo, hi, prices)
    assigned = costs[rows, labels]
    cost = float(assigned.sum())
    dual = float((costs + p).min(axis=1).sum() - hi @ np.maximum(p, 0) - lo @ np.minimum(p, 0))
    gap = (cost - dual) / abs(cost) if cost else cost - dual
    return Assignment(labels, p, cost, gap, int((assigned > least).sum()), counts)


def _solve(
    costs: np.ndarray, lo: np.ndarray, hi: np.ndarray, warm: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Optimal labels int64 [N] and the prices float64 [K] that certify them."""
    num_points, k = costs.shape
    strides = [max(1, num_points // max(_SAMPLE, 64 * k))]
    while strides[-1] > _FINER:
        strides.append(strides[-1] // _FINER)
    scale = _spread(costs[:: strides[0]])
    p = np.zeros(k) if warm is None else warm
    if scale == 0.0 or (warm is not None and _band(costs, lo, hi, p, 0, 0)[-1] < _WARM_ERROR * num_points):
        strides = []
    for stride in strides:
        sample, share = costs[::stride], len(costs[::stride]) / num_points
        if stride == strides[0]:
            for level in _ROUGH if warm is None else _ROUGH[2:]:
                p = _newton(sample, lo * share, hi * share, p, level * scale)
        else:
            rows, need, room = _band(sample, lo * share, hi * share, p, _BAND, _BAND_PER_ERROR)[:3]
            if _can_hold(need, room, len(rows)):
                p = _newton(sample[rows], need, room, p, _ROUGH[-1] * scale)
    factor, worst = 1, np.inf
    while True:
        band, need, room, labels, width, error = _band(costs, lo, hi, p, factor * _BAND, factor * _BAND_PER_ERROR)
        if error < worst:
            best, worst = p, error
        elif p is not best:  # what the last band led to is farther off than what it began with
            p, factor = best, 4 * factor
            continue
        q = p
        if _can_hold(need, room, len(band)):
            inside = costs[band]
            eps = min(_FINE[0] * scale, width)  # prices that are nearly right need no high temperature
            while eps > 0:
                q = _newton(inside, need, room, q, eps)
                eps = max(eps / 16, _FINE[1] * scale) if eps > _FINE[1] * scale else 0.0
            found = np.empty(len(band), dtype=np.int64)
            q = _repair(inside, q, need, room, found)
            if float(np.ptp(q - p)) <= width:
                labels[band] = found
                return labels, q
        p, factor = q, 4 * factor


def _spread(costs: np.ndarray) -> float:
    """What temperatures are measured in: the standard deviation, unless a few far points make it much too large."""
    typical = float(np.median(np.ptp(costs, axis=1)))
    return min(float(costs.std()), typical) if typical > 0 else float(costs.std())


def _band(
    costs: np.ndarray, lo: np.ndarray, hi: np.ndarray, p: np.ndarray, size: int, per_error: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float, float]:
    """The points that prices near `p` may send elsewhere.

    They are about `size`, and at every cluster `per_error` for each point that its count is off.

    Returns:
        their rows, the bounds that the others leave for them (the lower ones may be negative), the cheapest cluster of every
        point under `p`, the margin between a point's two cheapest clusters up to which points are in the band, infinite if
        all are, and the sum of what the counts are off.
    """
    num_points, k = costs.shape
    adjusted = costs + p
    rows = np.arange(num_points)
    labels = adjusted.argmin(axis=1)
    least = adjusted[rows, labels]
    adjusted[rows, labels] = np.inf
    second = adjusted.argmin(axis=1)
    margin = adjusted[rows, second] - least
    counts = np.bincount(labels, minlength=k)
    off = np.abs(counts - np.where(p > 0, hi, np.where(p < 0, lo, np.clip(counts, lo, hi))))
    size = max(size, int(off.sum()))
    if size >= num_points:
        return rows, lo, hi, labels, np.inf, float(off.sum())
    width = float(np.partition(margin, size)[size])
    for c in np.flatnonzero(off):
        near = margin[(labels == c) | (second == c)]
        wanted = int(per_error * off[c])
        width = max(width, float(np.partition(near, wanted)[wanted]) if wanted < len(near) else float(margin.max()))
    band = np.flatnonzero(margin <= width)
    fixed = counts - np.bincount(labels[band], minlength=k)
    return band, lo - fixed, hi - fixed, labels, width, float(off.sum())


def _can_hold(need: np.ndarray, room: np.ndarray, num_points: int) -> bool:
    """Whether so many points fit the bounds; the lower ones of a band may be negative."""
    return bool((room >= 0).all() and np.maximum(need, 0).sum() <= num_points <= room.sum())


def _newton(costs: np.ndarray, lo: np.ndarray, hi: np.ndarray, p: np.ndarray, eps: float) -> np.ndarray:
    """Ascend the smoothed dual at one temperature.

    The dual has a kink at every p_c = 0: a price rests there while its cluster's count is within the bounds, and a step
    that would change a price's sign stops at 0.
    """
    k = costs.shape[1]
    by_cluster = np.ascontiguousarray(costs.T)  # [K, n]: sums over clusters run along whole rows

    def dual(p: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        z = by_cluster + p[:, None]
        least = z.min(axis=0)
        z -= least
        z *= -1.0 / eps
        np.exp(z, out=z)
        total = z.sum(axis=0)
        z /= total
        value = float((least - eps * np.log(total)).sum() - hi @ np.maximum(p, 0) - lo @ np.minimum(p, 0))
        return value, z.sum(axis=1), z

    value, counts, z = dual(p)
    for _ in range(_NEWTON_STEPS):
        side = np.where(p != 0, np.sign(p), np.where(counts > hi, 1.0, np.where(counts < lo, -1.0, 0.0)))
        ascent = np.where(side > 0, counts - hi, counts - lo)
        if not side.any() or np.abs(ascent[side != 0]).max() < _COUNT_ERROR:
            break
        curvature = (np.diag(counts) - z @ z.T) / eps
        curvature[np.diag_indices(k)] += 1e-9 * max(curvature.max(), 1.0 / eps)  # equal shifts may change nothing
        while True:  # prices at 0 that the step would send the wrong way stay there
            free = np.flatnonzero(side)
            step = np.zeros(k)
            step[free] = np.linalg.solve(curvature[np.ix_(free, free)], ascent[free])
            wrong = (p == 0) & (step * side < 0)
            if not wrong.any():
                break
            side[wrong] = 0.0
        step *= min(1.0, _REACH * eps / max(np.abs(step).max(), 1e-300))  # few points near say little
        length = 1.0
        while length > 1e-4:
            ahead = p + length * step
            ahead[ahead * side < 0] = 0.0
            risen = dual(ahead)
            if risen[0] > value:
                break
            length /= 4
        else:
            break
        p, (value, counts, z) = ahead, risen
    return p


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
