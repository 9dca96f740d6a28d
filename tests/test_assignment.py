"""Assignment with bounds against scipy's linprog and OR-tools."""

import numpy as np
import pytest
from scipy.optimize import linprog

from cluster_ds.assignment import assign


def lp_optimum(costs, lo, hi):
    """The same problem as a linear program; the transportation polytope has integral vertices."""
    n, k = costs.shape
    each_once = np.kron(np.eye(n), np.ones((1, k)))
    sizes = np.tile(np.eye(k), (1, n))
    found = linprog(
        costs.ravel(), A_ub=np.vstack([sizes, -sizes]), b_ub=np.concatenate([hi, -lo]), A_eq=each_once, b_eq=np.ones(n),
        bounds=(0, 1),
    )
    assert found.status == 0
    return found.fun


def random_case(rng, kind):
    n, k = int(rng.integers(1, 40)), int(rng.integers(1, 7))
    costs = {
        "continuous": lambda: rng.random((n, k)),
        "ties": lambda: rng.integers(0, 4, (n, k)).astype(float),
        "zeros": lambda: np.zeros((n, k)),
        "duplicates": lambda: rng.random((n, k))[rng.integers(0, max(1, n // 4), n)],
        "negative": lambda: rng.random((n, k)) - rng.random(),
    }[kind]()
    while True:
        lo = rng.integers(0, n // k + 1, k)
        hi = lo + rng.integers(0, n + 1, k)
        if lo.sum() <= n <= hi.sum():
            return costs, lo, hi


@pytest.mark.parametrize("kind", ["continuous", "ties", "zeros", "duplicates", "negative"])
def test_equals_linear_program(kind):
    rng = np.random.default_rng(sum(map(ord, kind)))
    for _ in range(80):
        costs, lo, hi = random_case(rng, kind)
        found = assign(costs, lo, hi)
        sizes = np.bincount(found.labels, minlength=len(lo))
        assert (sizes >= lo).all() and (sizes <= hi).all()
        assert found.cost == pytest.approx(lp_optimum(costs, lo, hi), rel=1e-9, abs=1e-9)
        assert abs(found.gap) < 1e-9 or abs(found.cost) < 1e-9


@pytest.mark.parametrize(("n", "k", "alpha"), [(3000, 4, 1.0), (3000, 8, 1.2), (4000, 16, 1.05)])
def test_equals_min_cost_flow(n, k, alpha):
    ortools = pytest.importorskip("ortools.graph.python.min_cost_flow")
    rng = np.random.default_rng(n + k)
    centers = rng.normal(size=(k, 5))
    points = centers[np.minimum(rng.zipf(1.7, n), k) - 1] * 0.5 + rng.normal(size=(n, 5))
    costs = ((points[:, None] - centers[None]) ** 2).sum(-1)
    hi = np.full(k, int(np.ceil(alpha * n / k)))
    flow = ortools.SimpleMinCostFlow()
    scaled = np.round(costs * 1e7).astype(np.int64)
    tails, heads = np.repeat(np.arange(n), k), n + np.tile(np.arange(k), n)
    arcs = flow.add_arcs_with_capacity_and_unit_cost(tails, heads, np.ones(n * k, dtype=np.int64), scaled.ravel())
    flow.add_arcs_with_capacity_and_unit_cost(n + np.arange(k), np.full(k, n + k), hi, np.zeros(k, dtype=np.int64))
    flow.set_nodes_supplies(np.arange(n + k + 1), np.concatenate([np.ones(n), np.zeros(k), [-n]]).astype(np.int64))
    assert flow.solve() == flow.OPTIMAL
    optimum = (flow.flows(arcs).reshape(n, k) * costs).sum()
    found = assign(costs, np.zeros(k, dtype=int), hi)
    assert np.bincount(found.labels, minlength=k).max() <= hi[0]
    assert found.num_moved > 0
    assert found.cost <= optimum * (1 + 1e-9)
    assert abs(found.gap) < 1e-12


def test_free_bounds_give_the_nearest_cluster():
    costs = np.array([[1.0, 2.0], [3.0, 1.0], [0.0, 5.0]])
    found = assign(costs, np.zeros(2, int), np.full(2, 3))
    assert found.labels.tolist() == [0, 1, 0]
    assert found.cost == 2.0 and found.num_moved == 0 and found.prices.tolist() == [0.0, 0.0]


def test_the_cheapest_point_moves_when_the_cap_binds():
    # All three prefer cluster 0; with room for two, point 1 loses least (0.5) by moving.
    costs = np.array([[0.0, 2.0], [0.0, 0.5], [0.0, 1.0]])
    found = assign(costs, np.zeros(2, int), np.array([2, 3]))
    assert found.labels.tolist() == [0, 1, 0] and found.cost == 0.5 and found.num_moved == 1
    assert found.cheapest_sizes.tolist() == [3, 0]
    assert 0.5 <= found.prices[0] - found.prices[1] <= 1.0


def test_warm_prices_do_not_change_the_optimum():
    rng = np.random.default_rng(3)
    costs = rng.random((500, 5)) * np.array([1.0, 2.0, 2.0, 3.0, 3.0])
    lo, hi = np.full(5, 90), np.full(5, 120)
    cold = assign(costs, lo, hi)
    for warm in (cold.prices, -cold.prices, np.full(5, 1e9)):
        assert assign(costs, lo, hi, warm).cost == pytest.approx(cold.cost, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6, 1e12])
def test_scale_does_not_matter(scale):
    rng = np.random.default_rng(5)
    costs = rng.random((60, 4)) + np.array([0.0, 1.0, 1.0, 1.0])
    expected = assign(costs, np.full(4, 15), np.full(4, 15))
    found = assign(costs * scale, np.full(4, 15), np.full(4, 15))
    assert found.labels.tolist() == expected.labels.tolist() and abs(found.gap) < 1e-9


def test_refusals_name_the_numbers():
    with pytest.raises(ValueError, match="cannot hold 3 points.*allow 0 to 2"):
        assign(np.zeros((3, 2)), np.zeros(2, int), np.ones(2, int))
    with pytest.raises(ValueError, match="1 of 2 rows"):
        assign(np.array([[1.0, 2.0], [np.nan, 1.0]]), np.zeros(2, int), np.full(2, 2))


@pytest.mark.parametrize(
    ("n", "k", "alpha", "far"), [(20_000, 4, 1.2, 0), (40_000, 8, 1.0, 0), (20_000, 32, 1.3, 0), (30_000, 8, 1.1, 1e4)]
)
def test_the_prices_leave_little_to_repair(monkeypatch, n, k, alpha, far):
    """Cold and warm, the smoothed dual must come so close that a few pushes finish: one push scans all points."""
    import cluster_ds.assignment as module

    pushes = []
    push = module._push
    monkeypatch.setattr(module, "_push", lambda *args: (pushes.append(1), push(*args)))
    rng = np.random.default_rng(k)
    centers = rng.normal(size=(k, 16))
    points = centers[np.minimum(rng.zipf(1.5, n), k) - 1] * 0.5 + rng.normal(size=(n, 16))
    points[::1000] += far  # a few broken rows must not decide the temperatures
    costs = (points**2).sum(1)[:, None] - 2 * points @ centers.T + (centers**2).sum(1)
    lo, hi = np.zeros(k, int), np.full(k, int(np.ceil(alpha * n / k)))
    cold = assign(costs, lo, hi)
    assert cold.num_moved > n // 20 and len(pushes) < 20 * k and abs(cold.gap) < 1e-12
    pushes.clear()
    warm = assign(costs + rng.normal(size=costs.shape) * 0.01, lo, hi, cold.prices)
    assert len(pushes) < 20 * k and abs(warm.gap) < 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_the_band_is_exact_on_every_kind_of_problem(monkeypatch, seed):
    """A small band on problems that scipy can solve: what it holds back must be held rightly, or the band must grow."""
    import cluster_ds.assignment as module

    monkeypatch.setattr(module, "_BAND", 8)
    monkeypatch.setattr(module, "_SAMPLE", 16)
    rng = np.random.default_rng(seed)
    for _ in range(25):
        n, k = int(rng.integers(60, 200)), int(rng.integers(2, 7))
        costs = rng.random((n, k)) * 10.0 ** rng.integers(-2, 3) + rng.random(k) * rng.integers(0, 4)
        if seed % 3 == 0:
            costs = np.round(costs, 1)  # ties
        if seed % 3 == 1:
            costs = costs[rng.integers(0, 20, n)]  # duplicates
        lo = rng.integers(0, n // k + 1, k)
        hi = np.maximum(lo, rng.integers(n // k, n // k + n // 3 + 1, k))
        hi[0] += max(0, n - hi.sum())
        warm = rng.normal(size=k) if rng.random() < 0.5 else None
        found = assign(costs, lo, hi, warm)
        sizes = np.bincount(found.labels, minlength=k)
        assert (sizes >= lo).all() and (sizes <= hi).all() and abs(found.gap) < 1e-9
        if n < 100:
            assert found.cost == pytest.approx(lp_optimum(costs, lo, hi), rel=1e-9, abs=1e-9)
