"""C cases: clustering and numerics."""

import csv
import os
import subprocess
import sys

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score

from cluster_ds import make_plan
from cluster_ds.clustering import cluster

from .inputs.c02_features import c02
from .support import INPUTS


def points(name):
    """The numbers of a CSV file whose first column is an id."""
    header, *body = csv.reader((INPUTS / name).open())
    assert header[0] == "id"
    return np.array([[float(value) for value in row[1:]] for row in body])


def test_C01_fewer_distinct_points_than_clusters():
    features = points("c01_duplicates.csv")
    assert len(features) == 40 and len(np.unique(features, axis=0)) == 3
    ids = [f"s{i:02d}" for i in range(40)]
    with pytest.warns(UserWarning, match="3 distinct points for 4 clusters"):
        plan = make_plan(features, ids, np.full(40, 8), num_clusters=4, ratio=1.0)
    assert sorted(plan.manifest["sizes"]) == [13, 13, 14] and plan.kept.sum() == 39
    assert sorted(plan.manifest["weights"]) == pytest.approx([13 * 3 / 40, 13 * 3 / 40, 14 * 3 / 40])
    for c in range(3):
        assert len(np.unique(features[plan.cluster == c], axis=0)) == 1


RUN = """
import hashlib, sys
sys.path.insert(0, {root!r})
import numpy as np
from cluster_ds import make_plan
from tests.cases.inputs.c02_features import c02
x, _ = c02()
plan = make_plan(x, [f"s{{i:04d}}" for i in range(len(x))], np.full(len(x), 8), num_clusters=3, ratio=0.5, normalize=False)
print(hashlib.sha256(plan.cluster.tobytes() + plan.kept.tobytes()).hexdigest(), repr(float(plan.distance.sum())))
"""


def test_C02_same_seed_same_labels():
    x, _ = c02()
    ids = [f"s{i:04d}" for i in range(len(x))]
    first = make_plan(x, ids, np.full(len(x), 8), num_clusters=3, ratio=0.5, normalize=False)
    for _ in range(9):
        again = make_plan(x, ids, np.full(len(x), 8), num_clusters=3, ratio=0.5, normalize=False)
        assert (again.cluster == first.cluster).all() and (again.kept == first.kept).all()
        assert np.allclose(again.distance, first.distance, rtol=0, atol=1e-6)
    root = str(INPUTS.parent.parent.parent)
    outputs = {
        subprocess.run([sys.executable, "-c", RUN.format(root=root)], env={**os.environ, "OMP_NUM_THREADS": threads},
                       capture_output=True, text=True, check=True).stdout
        for threads in ("1", "2", "4")
    }
    assert len(outputs) == 1
    order = np.random.default_rng(0).permutation(len(x))
    other = make_plan(x[order], [ids[i] for i in order], np.full(len(x), 8), num_clusters=3, ratio=0.5, normalize=False)
    back = np.argsort(order)
    assert adjusted_rand_score(first.cluster, other.cluster[back]) >= 0.99
    assert (first.cluster == other.cluster[back]).mean() > 0.99  # the same numbers as well


def test_C04_size_bounds_are_kept():
    x = points("c04_points.csv")
    assert len(x) == 50
    labels = {}
    for alpha, cap in ((1.0, 5), (1.2, 6)):
        found = cluster(x, 10, alpha=alpha)
        assert found.sizes.sum() == 50 and found.sizes.max() <= cap
        assert alpha > 1 or (found.sizes == 5).all()
        costs = ((x[:, None] - found.centroids[None]) ** 2).sum(axis=2)
        columns = np.repeat(np.arange(10), cap)
        rows, chosen = linear_sum_assignment(costs[:, columns])
        best = costs[rows, columns[chosen]].sum()
        assert costs[np.arange(50), found.labels].sum() == pytest.approx(best, rel=1e-9)
        labels[alpha] = found.labels
    for scale in (1e-6, 1e6):
        assert (cluster(x * scale, 10, alpha=1.2).labels == labels[1.2]).all()
