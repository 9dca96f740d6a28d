"""Near-duplicates against all pairs."""

import numpy as np
import pytest

from cluster_ds.duplicates import near_duplicates
from cluster_ds.features import Points, as_features
from cluster_ds.planning import make_plan


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def with_copies(n, copies, dim, cosine, seed=0):
    """n random unit vectors; the last `copies` are the first ones, turned away to the given cosine."""
    rng = np.random.default_rng(seed)
    x = unit(rng.normal(size=(n, dim)) + 1.5)
    away = rng.normal(size=(copies, dim))
    away = unit(away - (away * x[:copies]).sum(axis=1, keepdims=True) * x[:copies])
    x[-copies:] = cosine * x[:copies] + np.sqrt(1 - cosine**2) * away
    return x


@pytest.mark.parametrize("dim", [64, 700])  # compared as they are, and in the projection
def test_a_cluster_that_fits_a_leaf_is_compared_completely(dim):
    rng = np.random.default_rng(2)
    rows_like_a_template = unit(rng.normal(size=dim) + 0.1005 * rng.normal(size=(100, dim)))  # cosines about .99
    x = np.concatenate([with_copies(300, 40, dim, 0.995), with_copies(200, 10, dim, 0.97, seed=1), rows_like_a_template])
    labels = np.repeat([0, 1, 0], [300, 200, 100])
    names = rng.permutation(600)  # any order of ids
    by_id = np.argsort(names)
    found = near_duplicates(Points(as_features(x), np.arange(600)), labels, by_id, 0.99)
    cosines = x @ x.T
    same = (cosines >= 0.99) & (labels[:, None] == labels)
    expected = np.arange(600)
    for i in by_id:  # greedy, by id
        earlier = [j for j in np.flatnonzero(same[i]) if names[j] < names[i] and expected[j] == j]
        if earlier:
            expected[i] = max(earlier, key=lambda j: cosines[i, j])
    if dim == 64:
        np.testing.assert_array_equal(found.first, expected)
    np.testing.assert_array_equal(found.repeated[:500], expected[:500] != np.arange(500))
    assert found.repeated[:500].sum() == 40
    left, least = (~found.repeated[500:]).sum(), (expected[500:] == np.arange(500, 600)).sum()
    assert 2 <= least <= left <= (1 if dim == 64 else 2) * least  # in the projection the leaf only guesses which ones stay
    assert (names[found.pairs[:, 0]] < names[found.pairs[:, 1]]).all()
    np.testing.assert_allclose(found.cosines, cosines[found.pairs[:, 0], found.pairs[:, 1]], rtol=1e-9)


def test_recall_in_a_large_cluster():
    x = with_copies(9000, 600, 512, 0.993).astype(np.float16)
    points = Points(as_features(x), np.arange(9000), 1.0 / np.linalg.norm(x.astype(float), axis=1))
    found = near_duplicates(points, np.zeros(9000, dtype=int), np.arange(9000), 0.99)
    right = found.first[-600:] == np.arange(600)
    assert right.mean() > 0.9  # .97 when this was written; leaves of 1,024 in three trees
    assert found.repeated.sum() == right.sum()


def test_many_copies_of_one_row_cost_links_and_not_pairs():
    x = np.repeat(unit(np.random.default_rng(0).normal(size=(2, 30))), [3000, 1], axis=0)
    found = near_duplicates(Points(as_features(x), np.arange(3001)), np.zeros(3001, dtype=int), np.arange(3001), 1.0)
    assert found.num_groups == 1 and found.repeated.sum() == 2999 and len(found.pairs) < 3 * 3000


def test_dedup_leaves_one_of_each_group_and_counts_no_other():
    x = with_copies(200, 30, 40, 0.999)
    ids, lengths = [f"s{i:03d}" for i in range(200)], np.full(200, 9)
    kept = make_plan(x, ids, lengths, num_clusters=2, alpha=2.0, ratio=1.0)
    facts = kept.manifest["near_duplicates"]
    assert (facts["num_repeated"], facts["num_groups"], len(facts["closest"])) == (30, 30, 30)
    assert set(facts["closest"][0][0][:1]) == {"s"} and "30 samples repeat an earlier one" in "\n".join(kept.lines())
    without = make_plan(x, ids, lengths, num_clusters=2, alpha=2.0, ratio=1.0, dedup=True)
    assert not without.kept[170:].any() and sum(without.manifest["sizes"]) == 170
    assert without.manifest["excluded"]["near-duplicate"] == 30
    sizes = np.bincount(without.cluster[:170])
    assert without.manifest["weights"] == pytest.approx((sizes * 2 / 170).tolist())


def test_a_chain_of_near_points_does_not_vanish():
    """200 points along a quarter of a circle, neighbours at cosine .99997: one stays every 8.1 degrees, where .99 is reached."""
    angles = np.linspace(0, np.pi / 2, 200)
    x = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    found = near_duplicates(Points(as_features(x), np.arange(200)), np.zeros(200, dtype=int), np.arange(200), 0.99)
    kept = np.flatnonzero(~found.repeated)
    near = (x * x[found.first]).sum(axis=1)
    assert (near >= 0.99 - 1e-9).all() and not found.repeated[found.first].any()
    assert np.degrees(np.diff(angles[kept])).max() < 2 * np.degrees(np.arccos(0.99)) and 11 <= len(kept) <= 13
