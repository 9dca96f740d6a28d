import warnings

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from cluster_ds.clustering import cluster, size_bounds


def blobs(sizes, dim=8, spread=0.3, seed=0):
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(len(sizes), dim)) * 2
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return centers[labels] + rng.normal(size=(len(labels), dim)) * spread, labels


@pytest.mark.parametrize(
    ("n", "k", "alpha", "beta", "expected"),
    [
        (100, 4, 1.5, 0.0, (1, 37)),  # floor(37.5)
        (10, 4, 1.0, 0.0, (2, 3)),  # equal sizes: floor and ceiling of 2.5, never 3, 3, 3, 1
        (10, 4, 1.1, 0.0, (1, 3)),  # floor(2.75) = 2 holds only 8 points, so the ceiling
        (100, 4, 1.5, 0.5, (12, 37)),
        (4, 4, 1.5, 0.0, (1, 1)),
    ],
)
def test_size_bounds(n, k, alpha, beta, expected):
    assert size_bounds(n, k, alpha, beta) == expected


def test_size_bounds_refusals():
    with pytest.raises(ValueError, match="3 samples cannot fill 4 clusters"):
        size_bounds(3, 4, 1.5, 0)
    with pytest.raises(ValueError, match="alpha 0.9 is below 1"):
        size_bounds(10, 2, 0.9, 0)
    with pytest.raises(ValueError, match="min_fraction 1.2"):
        size_bounds(10, 2, 1.5, 1.2)


def test_four_points_by_hand():
    found = cluster(np.array([[0.0, 0.0], [0.0, 1.0], [10.0, 0.0], [10.0, 1.0]]), 2)
    assert found.labels.tolist() == [0, 0, 1, 1]  # equal sizes: the cluster of the smallest id comes first
    assert found.centroids.tolist() == [[0.0, 0.5], [10.0, 0.5]]
    assert found.distances.tolist() == [0.5] * 4
    assert found.inertia == 1.0 and found.num_moved == 0 and found.gap == 0.0


def test_free_clustering_is_as_good_as_sklearn():
    points, truth = blobs([300, 250, 200, 250])
    found = cluster(points, 4)
    reference = KMeans(4, n_init=10, random_state=0).fit(points)
    assert found.inertia <= reference.inertia_ * (1 + 1e-6)
    assert adjusted_rand_score(truth, found.labels) > 0.99


def test_bounds_hold_and_the_assignment_is_optimal_at_the_returned_centroids():
    points, _ = blobs([700, 60, 20, 20], seed=1)
    found = cluster(points, 4, alpha=1.2, min_fraction=0.5)
    assert found.sizes.max() <= 240 and found.sizes.min() >= 100 and found.sizes.sum() == 800
    assert found.num_moved > 0 and abs(found.gap) < 1e-9
    costs = ((points[:, None] - found.centroids[None]) ** 2).sum(-1)
    from cluster_ds.assignment import assign

    assert found.nearest_sizes.tolist() == np.bincount(costs.argmin(1), minlength=4).tolist() != found.sizes.tolist()
    optimum = assign(costs, np.full(4, found.floor), np.full(4, found.cap)).cost
    assert costs[np.arange(800), found.labels].sum() == pytest.approx(optimum, rel=1e-9)
    for c in range(4):  # converged: centroids are their members' means
        np.testing.assert_allclose(found.centroids[c], points[found.labels == c].mean(axis=0), atol=1e-9)


def test_equal_sizes_against_the_hungarian_method():
    points = np.random.default_rng(2).random((50, 2))
    found = cluster(points, 10, alpha=1.0)
    assert found.sizes.tolist() == [5] * 10
    costs = np.repeat(((points[:, None] - found.centroids[None]) ** 2).sum(-1), 5, axis=1)
    rows, columns = linear_sum_assignment(costs)
    assert found.inertia == pytest.approx(costs[rows, columns].sum(), rel=1e-9)
    for scale in (1e-6, 1e6):
        assert cluster(points * scale, 10, alpha=1.0).labels.tolist() == found.labels.tolist()


def test_order_of_rows_does_not_matter_when_ids_are_given():
    points, _ = blobs([50, 40, 30], spread=1.5, seed=3)
    ids = np.array([f"{i:03d}" for i in range(120)])
    found = cluster(points, 3, alpha=1.1, ids=ids)
    order = np.random.default_rng(0).permutation(120)
    permuted = cluster(points[order], 3, alpha=1.1, ids=ids[order])
    assert permuted.labels.tolist() == found.labels[order].tolist()
    np.testing.assert_array_equal(permuted.distances, found.distances[order])


def test_clusters_are_numbered_by_size():
    points, _ = blobs([20, 90, 40])
    assert cluster(points, 3, alpha=3).sizes.tolist() == [90, 40, 20]


def test_fewer_distinct_points_than_clusters():
    points = np.repeat(np.eye(3), [13, 14, 13], axis=0)
    with pytest.warns(UserWarning, match="3 distinct points for 4 clusters"):
        found = cluster(points, 4)
    assert found.sizes.tolist() == [14, 13, 13] and found.inertia == 0.0


def test_identical_points_are_split_only_as_far_as_the_cap_forces():
    points = np.concatenate([np.zeros((30, 2)), np.ones((10, 2))])
    found = cluster(points, 2, alpha=1.0)
    assert found.sizes.tolist() == [20, 20]
    assert len(set(found.labels[30:])) == 1  # the ones stay together


def test_no_cluster_is_empty_even_without_a_lower_bound():
    points = np.concatenate([np.zeros((50, 2)), [[1.0, 0.0]], [[0.0, 1.0]], np.full((50, 2), 0.01)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cluster(points, 4, alpha=2.0).sizes.min() >= 1


def test_nan_is_refused_with_ids():
    points = np.ones((4, 2))
    points[[1, 3]] = [np.nan, np.inf]
    with pytest.raises(ValueError, match="2 of 4 feature rows hold NaN or infinity: samples b, d"):
        cluster(points, 2, ids=["a", "b", "c", "d"])


def test_many_dimensions_are_searched_in_a_projection_and_finished_in_full():
    points, truth = blobs([500, 100, 60, 40], dim=600, spread=1.0, seed=4)
    free = cluster(points, 4, alpha=4.0)
    assert adjusted_rand_score(truth, free.labels) > 0.99
    bounded = cluster(points, 4, alpha=1.2, min_fraction=0.5)
    assert bounded.sizes.max() <= 210 and bounded.sizes.min() >= 87 and abs(bounded.gap) < 1e-9
    distances = np.linalg.norm(points - bounded.centroids[bounded.labels], axis=1)  # of the full vectors
    np.testing.assert_allclose(bounded.distances, distances)


def test_a_hundred_clusters_within_binding_bounds():
    points = np.random.default_rng(6).normal(size=(3000, 6)) * np.array([3.0, 1, 1, 1, 1, 1])
    found = cluster(points, 100, alpha=1.1, min_fraction=0.8, num_restarts=2)
    assert found.sizes.max() <= 33 and found.sizes.min() >= 24 and found.sizes.sum() == 3000
    assert found.num_moved > 100 and abs(found.gap) < 1e-9


def test_too_little_memory_is_said_with_both_numbers(monkeypatch):
    import cluster_ds.clustering as module

    monkeypatch.setattr(module, "available_memory", lambda: 5 * 10**9)
    assert module.require_memory(100_000, 4096, 8, 1.5, False) < 1.5e9
    with pytest.raises(ValueError, match=r"10000000 samples into 64 needs about [34]\d.\d GB of memory, 5.0 GB are free: lower"):
        module.require_memory(10_000_000, 4096, 64, 1.5, False)


def test_vectors_of_any_length_are_projected():
    points, truth = blobs([300, 200], dim=600, spread=1.0, seed=4)
    for scale in (1e-6, 1e6):
        assert adjusted_rand_score(cluster(points * scale, 2).labels, truth) > 0.99


def test_means_are_the_members_on_exact_ties():
    """Points between two centroids: the bound sends one away at no cost, and the means must follow."""
    from cluster_ds.clustering import lloyd
    from cluster_ds.features import Points, as_features

    points = np.array([[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 7.0]])
    for start in ([[-0.5, 7.0], [0.5, 0.0]], [[0.0, 0.0], [0.0, 0.0]]):
        data = Points(as_features(points), np.arange(4))
        centroids, labels, solution = lloyd(data, np.array(start), np.array([2, 2]), np.array([2, 2]), 1e-7)
        assert np.bincount(labels).tolist() == [2, 2]
        costs = ((points[:, None] - centroids[None]) ** 2).sum(-1)
        assert solution.cost == pytest.approx(costs[np.arange(4), labels].sum())
        for c in range(2):
            np.testing.assert_allclose(centroids[c], points[labels == c].mean(axis=0))
