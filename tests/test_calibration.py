"""Calibrated weights against scipy's non-negative least squares."""

import numpy as np
import pytest
from scipy.optimize import nnls

import cluster_ds.calibration as module
from cluster_ds.calibration import calibrate
from cluster_ds.features import Points, as_features
from cluster_ds.planning import make_plan
from cluster_ds.variance import effective_sample_size


def problem(sizes=(60, 40), kept=12, dim=5, seed=0):
    """The farthest points of skewed clusters."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    x = rng.normal(size=(len(sizes), dim))[labels] + rng.gamma(1.0, 1.0, size=(len(labels), dim))
    means = np.array([x[labels == c].mean(axis=0) for c in range(len(sizes))])
    far = np.linalg.norm(x - means[labels], axis=1)
    rows = np.concatenate([np.flatnonzero(labels == c)[np.argsort(-far[labels == c])[:kept]] for c in range(len(sizes))])
    return x, labels, rows, means, np.array(sizes) / sum(sizes)


def by_nnls(x, labels, means, shares, ridge):
    """The primal problem as stacked rows of least squares."""
    k, amounts = len(shares), (shares / np.bincount(labels))[labels]
    about = x - means[labels]
    about /= np.sqrt((about**2).sum(axis=1).mean())
    own = [np.where(labels == c, np.sqrt(module._OWN / shares[c]) * amounts, 0.0) * about.T for c in range(k)]
    mass = np.array([np.where(labels == c, np.sqrt(module._MASS / shares[c]) * amounts, 0.0) for c in range(k)])
    left = np.concatenate([amounts * about.T, *own, mass, np.diag(np.sqrt(ridge * amounts))])
    right = np.concatenate([np.zeros(x.shape[1] * (k + 1)), np.sqrt(module._MASS * shares), np.sqrt(ridge * amounts)])
    weights = nnls(left, right)[0]
    return weights / (np.bincount(labels, weights) / np.bincount(labels))[labels]


@pytest.mark.parametrize("ridge", [10.0, 0.1, 0.003])
@pytest.mark.parametrize("held", [True, False])
def test_equal_to_non_negative_least_squares(monkeypatch, ridge, held):
    if not held:
        monkeypatch.setattr(module, "_HELD", 0)
    x, labels, rows, means, shares = problem()
    solver = module._Problem(Points(as_features(x), rows), labels[rows], means, shares)
    found, _ = solver.solve(ridge, np.zeros(solver.num_unknowns))
    expected = by_nnls(x[rows], labels[rows], means, shares, ridge)
    np.testing.assert_allclose(found.weights, expected, atol=2e-4)
    assert found.effective_sample_size == pytest.approx(effective_sample_size(expected), abs=1e-3)
    if ridge < 0.01:
        assert (found.weights == 0).any()  # the bound at 0 takes part


def shift(x, rows, weights, labels, shares):
    k = len(shares)
    means = [np.average(x[rows][labels[rows] == c], axis=0, weights=weights[labels[rows] == c]) for c in range(k)]
    return np.linalg.norm(shares @ np.array(means) - x.mean(axis=0)) / np.linalg.norm(x.mean(axis=0))


def test_the_bound_on_the_effective_sample_size_holds_and_is_used():
    x, labels, rows, means, shares = problem((400, 200, 200), 60, dim=8)
    ones = np.ones(len(rows))
    shifts = []
    for least in (0.95, 0.8, 0.6):
        found = calibrate(Points(as_features(x), rows), labels[rows], means, shares, least)
        assert least <= found.effective_sample_size < least + 0.06
        assert (found.weights >= 0).all()
        np.testing.assert_allclose(np.bincount(labels[rows], found.weights), np.bincount(labels[rows]))
        shifts.append(shift(x, rows, found.weights, labels, shares))
    assert shift(x, rows, ones, labels, shares) > shifts[0] > shifts[1] > shifts[2]


def test_four_samples_a_dimension_leave_a_tenth_of_the_bias():
    """Half of every cluster kept, four times as many samples of each as dimensions, effective sample size .75 or more."""
    rng = np.random.default_rng(5)
    labels, dim = np.repeat(np.arange(4), 128), 16
    x = 2 * rng.normal(size=(4, dim))[labels] + rng.normal(size=(512, dim)) + rng.gamma(1.0, 0.5, size=(512, dim))
    settings = {"num_clusters": 4, "alpha": 1.0, "ratio": 0.5, "min_effective": 0.75}
    ids, lengths = [f"s{i:03d}" for i in range(512)], np.full(512, 9)
    plan = make_plan(x, ids, lengths, weighting="calibrated", **settings)
    facts = plan.manifest["calibration"]
    assert plan.manifest["counts"] == [4 * dim] * 4
    assert facts["shift_before"] == pytest.approx(make_plan(x, ids, lengths, **settings).manifest["bias"]["relative_shift"])
    assert facts["shift_after"] == plan.manifest["bias"]["relative_shift"] < facts["shift_before"] / 10
    assert facts["effective_sample_size"] >= 0.75 and "calibrated: the shift" in "\n".join(plan.lines())


def test_calibrated_weights_are_the_clusters_times_the_calibration_in_any_unit():
    rng = np.random.default_rng(6)
    labels = np.repeat(np.arange(3), [200, 120, 80])
    x = 3 * rng.normal(size=(3, 12))[labels] + rng.gamma(1.0, 1.0, size=(400, 12))
    ids, lengths = [f"s{i:03d}" for i in range(400)], np.full(400, 9)
    settings = {"num_clusters": 3, "alpha": 1.6, "ratio": 0.5, "weighting": "calibrated", "normalize": False}
    plan = make_plan(x, ids, lengths, **settings)
    assert plan.manifest["sizes"] == [200, 120, 80]
    own = (plan.weight / np.array(plan.manifest["weights"])[plan.cluster])[plan.kept]
    assert plan.manifest["calibration"]["largest_weight"] == pytest.approx(own.max()) and own.max() > 1.2
    np.testing.assert_allclose(np.bincount(plan.cluster[plan.kept], own), plan.manifest["counts"])
    for factor in (1e3, 1e-3):
        np.testing.assert_allclose(make_plan(factor * x, ids, lengths, **settings).weight, plan.weight, atol=2e-3)
    cosines = []
    for c in range(3):
        mine = plan.cluster == c
        a, b = x[mine].mean(axis=0), np.average(x[mine & plan.kept], axis=0, weights=plan.weight[mine & plan.kept])
        cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert plan.manifest["bias"]["cosines"] == pytest.approx(cosines)


def test_a_bound_that_nothing_meets_is_said():
    x, labels, rows, means, shares = problem()
    with pytest.warns(UserWarning, match="no calibrated weights have an effective sample size of 1.0 or more"):
        found = calibrate(Points(as_features(x), rows), labels[rows], means, shares, 1.0)
    assert (found.weights == 1).all()
