"""Predicted variances against enumeration and against drawn batches."""

import itertools

import numpy as np
import pytest

from cluster_ds.features import Points, as_features
from cluster_ds.plan import random_part
from cluster_ds.planning import make_plan
from cluster_ds.schedule import Schedule
from cluster_ds.variance import Moments, cluster_sums, finite_batch_variance, quota_variance, simulate


def moments_of(x, labels):
    k = labels.max() + 1
    points = Points(as_features(x), np.arange(len(x)))
    sums = cluster_sums(points, labels, k, np.ones((1, len(x))))[0]
    return Moments.of(sums, np.bincount(labels), np.bincount(labels, (x**2).sum(axis=1), k))


def test_moments():
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(50, 3)), rng.integers(0, 3, 50)
    found = moments_of(x, labels)
    for c in range(3):
        np.testing.assert_allclose(found.means[c], x[labels == c].mean(axis=0))
        assert found.variances[c] == pytest.approx(x[labels == c].var(axis=0).sum())
    np.testing.assert_allclose(found.mean, x.mean(axis=0))
    assert found.shares @ found.variances + found.between == pytest.approx(x.var(axis=0).sum())


def test_the_finite_formula_is_the_mean_over_all_batches():
    x = np.array([[0.0, 1.0], [2.0, 0.0], [5.0, 1.0], [1.0, 1.0], [-1.0, 3.0]])
    labels, in_batch = np.array([0, 0, 0, 1, 1]), np.array([2, 1])
    weights = np.array([3 / 5, 2 / 5]) * 3 / in_batch  # pi_c B / b_c
    batches = [
        (np.array([*a, *b]), weights[[0, 0, 1]])
        for a in itertools.combinations([0, 1, 2], 2) for b in itertools.combinations([3, 4], 1)
    ]
    mean, _ = simulate(x, batches)
    assert finite_batch_variance(moments_of(x, labels), in_batch) == pytest.approx(mean, rel=1e-12)


@pytest.fixture(scope="module")
def proxies():
    """Clusters of unequal sizes and spreads."""
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(4), [500, 260, 150, 90])
    x = rng.normal(size=(4, 20))[labels] * 3 + rng.normal(size=(1000, 20)) * np.array([0.3, 1.0, 0.5, 1.5])[labels][:, None]
    return x, [f"s{i:04d}" for i in range(1000)]


def plan_of(proxies, quota):
    x, ids = proxies
    return make_plan(x, ids, np.full(1000, 9), num_clusters=4, alpha=2.5, quota=quota, keep=0.3, choice="random", redraw="epoch")


def measured(proxies, plan, moments, batch=24, epochs=120):
    schedule = Schedule(plan, global_batch_size=batch, epochs=epochs)
    whole = [schedule.batch(step) for step in range(schedule.num_steps) if (step + 1) % schedule.steps_per_epoch]
    strata = np.zeros(1000, dtype=int) if len(moments.sizes) == 1 else plan.cluster
    predicted = np.mean([
        finite_batch_variance(moments, np.bincount(strata[b.rows], minlength=len(moments.sizes))) for b in whole
    ])
    return predicted, *simulate(proxies[0], [(b.rows, b.weights) for b in whole])


def test_predictions_agree_with_drawn_batches_and_neyman_is_least(proxies):
    x, _ = proxies
    found = {}
    for quota in ("equal", "proportional", "neyman"):
        plan = plan_of(proxies, quota)
        moments = moments_of(x, plan.cluster.astype(int))
        predicted, mean, error = measured(proxies, plan, moments)
        assert abs(mean - predicted) < 4 * error, quota
        told = plan.manifest["variance"]
        assert told[quota] == pytest.approx(quota_variance(moments.shares, moments.variances, np.array(plan.manifest["counts"])))
        assert 0.85 < 24 * predicted / told[quota] < 1.1  # batches without replacement, whole numbers of each cluster
        found[quota] = mean
    whole = moments_of(x, np.zeros(1000, dtype=int))
    predicted, mean, error = measured(proxies, random_part(plan, 300, 0, redraw=True), whole)
    assert abs(mean - predicted) < 4 * error
    assert told["random"] == pytest.approx(x.var(axis=0).sum())
    assert found["neyman"] < found["proportional"] < mean and found["neyman"] < found["equal"]
    assert told["neyman"] <= told["proportional"] <= told["random"]


@pytest.mark.parametrize("weighting", ["cluster", "none", "calibrated"])
def test_bias_and_variance_of_what_is_kept(proxies, weighting):
    x, ids = proxies
    plan = make_plan(x, ids, np.full(1000, 9), num_clusters=4, alpha=2.5, ratio=0.5, weighting=weighting, min_effective=0.6)
    told, kept = plan.manifest["variance"], plan.kept
    mean = np.average(x[kept], axis=0, weights=plan.weight[kept])
    assert told["bias_squared"] == pytest.approx(((mean - x.mean(axis=0)) ** 2).sum())
    weighted = plan.weight[:, None] * x
    inside = np.array([weighted[kept & (plan.cluster == c)].var(axis=0).sum() for c in range(4)])
    assert told["kept"] == pytest.approx(inside.mean())  # equal counts
    if weighting == "cluster":
        spreads = [x[kept & (plan.cluster == c)].var(axis=0).sum() for c in range(4)]
        assert told["kept"] == pytest.approx(4 * ((np.bincount(plan.cluster) / 1000) ** 2 * spreads).sum())
    assert "equals the variance of random batches of" in "\n".join(plan.lines())


def test_plans_without_any_spread_or_bias_can_be_told():
    ids, lengths = [f"s{i:02d}" for i in range(60)], np.full(60, 9)
    same = np.ones((60, 3))
    with pytest.warns(UserWarning, match="1 distinct points"):
        assert "predicted variance" not in "\n".join(make_plan(same, ids, lengths, num_clusters=2).lines())
    three = np.repeat(np.eye(3), [30, 20, 10], axis=0)
    for quota in ("equal", "proportional", "neyman"):
        plan = make_plan(three, ids, lengths, num_clusters=3, alpha=2.0, quota=quota, ratio=0.5)
        assert "variance 0.000; no bias" in "\n".join(plan.lines())
    assert plan.manifest["counts"] == [8, 5, 2]  # without any spread Neyman's are proportional


def test_spreads_are_those_of_what_may_be_kept():
    """Broken rows that trimming removes must not draw quotas to their cluster."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(100, 4)) + 20, rng.normal(size=(100, 4)) - 20])
    x[:5] += 30
    ids, lengths = [f"s{i:03d}" for i in range(200)], np.full(200, 9)
    settings = {"num_clusters": 2, "quota": "neyman", "keep": 0.3, "normalize": False}
    whole, trimmed = (make_plan(x, ids, lengths, **settings, trim=trim) for trim in (0.0, 0.05))
    own = whole.cluster[0]
    assert whole.manifest["counts"][own] > 40 and 25 <= trimmed.manifest["counts"][own] <= 35


@pytest.mark.parametrize("weighting", ["cluster", "calibrated"])
def test_dedup_trim_quota_and_weights_together(proxies, weighting):
    x, ids = proxies
    x = np.concatenate([x, x[:200]])  # the first 200 a second time
    ids = [*ids, *(f"t{i:04d}" for i in range(200))]
    plan = make_plan(x, ids, np.full(1200, 9), num_clusters=4, alpha=2.5, quota="proportional", keep=0.4, dedup=True, trim=0.1,
                     near_duplicate_cosine=1.0, weighting=weighting)
    sizes = np.bincount(plan.cluster[:1000])
    assert plan.manifest["sizes"] == sizes.tolist() and not plan.kept[1000:].any() and plan.kept.sum() == 480
    shares = np.bincount(plan.cluster[plan.kept], weights=plan.weight[plan.kept]) / plan.weight[plan.kept].sum()
    np.testing.assert_allclose(shares, sizes / 1000, rtol=1e-9)  # of what is not left out, trimmed rows included
    bias = np.average(unit(x)[plan.kept], axis=0, weights=plan.weight[plan.kept]) - unit(x)[:1000].mean(axis=0)
    told = plan.manifest["bias"]["relative_shift"]
    assert told == pytest.approx(np.linalg.norm(bias) / np.linalg.norm(unit(x)[:1000].mean(axis=0)))
    assert "1000 samples in 4 clusters" in plan.lines()[0] and "kept 480 (40.0%)" in plan.lines()[1]


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)
