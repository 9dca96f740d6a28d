import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_ds.features import Points, as_features
from cluster_ds.selection import PlanSettings, apportion, cluster_weights, quota_counts
from cluster_ds.selection import select as select_with
from cluster_ds.variance import selection_bias

LABELS = np.array([0, 0, 0, 0, 1, 1])
DISTANCES = np.array([0.1, 0.4, 0.2, 0.4, 0.5, 0.3])
IDS = list("abcdef")


def select(labels, distances, ids, spreads=None, dropped=None, **settings):
    return select_with(labels, distances, ids, PlanSettings(**settings), spreads=spreads, dropped=dropped)


def bias_of(features, selection, labels):
    n = len(labels)
    points, ones = Points(as_features(features), np.arange(n)), np.ones(n)
    return selection_bias(points, labels, selection.kept, selection.weights, ones > 0, ones, (features**2).sum(axis=1))


def kept_ids(**settings):
    selection = select(LABELS, DISTANCES, IDS, **settings)
    return "".join(i for i, k in zip(IDS, selection.kept, strict=True) if k)


def test_choices_by_hand():
    assert kept_ids(ratio=1.0) == "bdef"  # the two farthest of cluster 0; all of cluster 1
    assert kept_ids(choice="core") == "acef"
    assert kept_ids(ratio=0.5) == "be"  # b and d tie: the smaller id
    assert kept_ids(ratio=0.01) == "be"  # at least one of each
    assert kept_ids(keep=4 / 6) == "bdef"


def test_weights_by_hand():
    assert cluster_weights(np.array([4, 2])).tolist() == [4 / 3, 2 / 3]
    selection = select(LABELS, DISTANCES, IDS)
    assert selection.weights.tolist() == pytest.approx([4 / 3] * 4 + [2 / 3] * 2)
    assert select(LABELS, DISTANCES, IDS, weighting="none").weights.tolist() == [1.0] * 6
    with pytest.raises(ValueError, match="cluster 1 is empty"):
        cluster_weights(np.array([3, 0]))


def test_quota_is_not_lost_to_rounding():
    sizes = np.array([100, 110])
    assert quota_counts(sizes, sizes, ratio=0.29).tolist() == [29, 29]  # 0.29 * 100 is 28.999999999999996


def test_budget_beyond_the_smallest_cluster_names_the_limit():
    with pytest.raises(ValueError, match=r"keep 0.9 needs 2 samples of every cluster.*cluster 1 has 1.*at most 0.4 "):
        quota_counts(np.array([4, 1]), np.array([4, 1]), keep=0.9)


def test_random_first_cuts_before_it_chooses():
    labels = np.repeat([0, 1], [1000, 10])
    distances, ids = np.arange(1010.0), [f"{i:04d}" for i in range(1010)]
    with pytest.warns(UserWarning, match="cluster 1 has 10 of 1010"):
        whole = select(labels, distances, ids, ratio=0.5).kept
        first = select(labels, distances, ids, ratio=0.5, balance="random_first").kept
    assert whole[995:1000].all()  # the very farthest
    assert not first[995:1000].all() and first[:1000].sum() == 5


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    ratio=st.floats(0.05, 1.0),
    choice=st.sampled_from(["peripheral", "random", "core"]),
    balance=st.sampled_from(["whole", "random_first"]),
    seed=st.integers(0, 3),
)
def test_equal_parts_whatever_the_order_of_rows(sizes, ratio, choice, balance, seed):
    import warnings

    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    distances = rng.integers(0, 5, len(labels)).astype(float)  # many ties
    ids = np.array([f"{i:05d}" for i in rng.permutation(len(labels))])
    settings = {"ratio": ratio, "choice": choice, "balance": balance, "seed": seed}
    order = rng.permutation(len(labels))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a = select(labels, distances, ids, **settings)
        b = select(labels[order], distances[order], ids[order], **settings)
    assert set(np.bincount(labels[a.kept], minlength=len(sizes))) == {max(1, int(ratio * min(sizes) + 1e-9))}
    assert set(ids[a.kept]) == set(ids[order][b.kept])
    # The weighted kept counts have the full data's cluster shares.
    share = np.bincount(labels[a.kept], weights=a.weights[a.kept]) / a.weights[a.kept].sum()
    np.testing.assert_allclose(share, np.array(sizes) / sum(sizes))


def test_random_choice_is_unbiased_and_peripheral_is_not():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(3000, 4)) + 1.0
    labels = (features[:, 0] > 1.4).astype(int)
    distances = np.linalg.norm(features - np.array([features[labels == c].mean(0) for c in (0, 1)])[labels], axis=1)
    ids = [f"{i:05d}" for i in range(3000)]
    shifts = []
    for seed in range(60):
        kept = select(labels, distances, ids, choice="random", ratio=0.3, seed=seed).kept
        weights = np.bincount(labels) / len(labels)
        means = [features[kept & (labels == c)].mean(axis=0) for c in (0, 1)]
        shifts.append(weights @ means - features.mean(axis=0))
    error = np.std(shifts, axis=0) / np.sqrt(len(shifts))
    assert (np.abs(np.mean(shifts, axis=0)) < 4 * error).all()
    skewed = np.exp(features)  # a long tail: the periphery lies on one side
    found = select(labels, np.abs(skewed[:, 1]), ids, ratio=0.3)
    bias = bias_of(skewed, found, labels)
    shift, cosines = bias.relative_shift, bias.cosines
    full, seen = skewed.mean(0), np.average(skewed[found.kept], axis=0, weights=found.weights[found.kept])
    assert shift == pytest.approx(np.linalg.norm(seen - full) / np.linalg.norm(full), rel=1e-9) and shift > 0.3
    assert cosines.max() < 1.0


def test_the_bias_without_weights_is_the_one_of_what_is_trained():
    features = np.repeat([[1.0, 0.0], [0.0, 1.0]], [900, 100], axis=0)
    labels = np.repeat([0, 1], [900, 100])
    ids = [f"{i:04d}" for i in range(1000)]
    with pytest.warns(UserWarning, match="cluster 1 has 100"):
        weighted, plain = (select(labels, np.zeros(1000), ids, weighting=w) for w in ("cluster", "none"))
    assert bias_of(features, weighted, labels).relative_shift == pytest.approx(0.0, abs=1e-12)
    # Without weights the mean is (.5, .5) instead of (.9, .1).
    assert bias_of(features, plain, labels).relative_shift == pytest.approx(np.hypot(0.4, 0.4) / np.hypot(0.9, 0.1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"choice": "periphral"}, "choice 'periphral': peripheral, random or core"),
        ({"balance": "all"}, "balance 'all': whole or random_first"),
        ({"weighting": "clusters"}, "weighting 'clusters': cluster, none or calibrated"),
        ({"ratio": 2}, r"ratio 2 is outside \(0, 1\]"), ({"ratio": -1}, "ratio -1 is outside"), ({"keep": 0}, "keep 0 is outside"),
        ({"ratio": 0.5, "keep": 0.5}, "both set the budget"), ({"quota": "even"}, "quota 'even': equal, proportional or neyman"),
        ({"trim": 0.3, "keep": 0.8}, "keep 0.8 is more than trim 0.3 leaves"), ({"trim": 1.0}, r"trim 1.0 is outside \[0, 1\)"),
        ({"quota": "neyman", "balance": "random_first"}, "random_first cuts clusters to equal sizes, quota neyman"),
        ({"redraw": "epoch"}, "redraw epoch draws at random, but choice is peripheral"),
        ({"redraw": "epoch", "choice": "random", "weighting": "calibrated"}, "calibrated is for fixed samples"),
        ({"near_duplicate_cosine": 0}, "near_duplicate_cosine 0 is outside"), ({"min_effective": 2}, "min_effective 2 is outside"),
    ],
)
def test_misspelt_or_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PlanSettings(**settings)


def test_quotas_by_hand():
    sizes = np.array([60, 30, 10])
    everything = {"sizes": sizes, "available": sizes}
    assert quota_counts(**everything, ratio=0.5).tolist() == [5, 5, 5]
    assert quota_counts(**everything, quota="proportional", ratio=1.0).tolist() == [18, 9, 3]  # as many as equal parts: 30
    assert quota_counts(**everything, quota="proportional", keep=0.7).tolist() == [42, 21, 7]  # out of reach of equal parts
    # Neyman: 60 x 1 : 30 x 2 : 10 x 8 = 3 : 3 : 4 of 20 would be 6, 6, 8.
    assert quota_counts(**everything, quota="neyman", keep=0.2, spreads=np.array([1.0, 2.0, 8.0])).tolist() == [6, 6, 8]
    # With 40 the third cluster is taken whole (10), the rest is shared 1 : 1.
    assert quota_counts(**everything, quota="neyman", keep=0.4, spreads=np.array([1.0, 2.0, 8.0])).tolist() == [15, 15, 10]
    assert quota_counts(**everything, quota="neyman", keep=0.2, spreads=np.array([1.0, 0.0, 0.0])).tolist() == [18, 1, 1]
    with pytest.raises(ValueError, match="keep 1 needs 100 samples, but 90 of 100 are left"):
        quota_counts(sizes, np.array([50, 30, 10]), quota="proportional", keep=1)
    weights = cluster_weights(sizes, np.array([6, 6, 8]))
    assert weights.tolist() == pytest.approx([0.6 * 20 / 6, 0.3 * 20 / 6, 0.1 * 20 / 8])


@given(
    shares=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), room=st.lists(st.integers(1, 500), min_size=8, max_size=8),
    part=st.floats(0, 1),
)
def test_apportion_meets_the_total_and_the_bounds(shares, room, part):
    most = np.array(room[: len(shares)])
    total = len(shares) + int(part * (most.sum() - len(shares)))
    counts = apportion(np.array(shares), total, most)
    assert counts.sum() == total and (counts >= 1).all() and (counts <= most).all()
    inside = (counts > 1) & (counts < most)  # proportional to within one where no bound binds
    if inside.sum() > 1:
        least = (counts[inside] - 1) / np.array(shares)[inside]
        assert least.max() <= ((counts[inside] + 1) / np.array(shares)[inside]).min()


def test_trimmed_rows_are_not_kept_but_count_in_the_weights():
    labels = np.repeat([0, 1], [20, 10])
    distances = np.concatenate([np.arange(20.0), np.arange(10.0)])
    found = select(labels, distances, np.arange(30), trim=0.1, ratio=0.5)
    assert np.flatnonzero(~found.pool).tolist() == [18, 19, 29]
    assert np.flatnonzero(found.kept).tolist() == [14, 15, 16, 17, 25, 26, 27, 28]  # floor(.5 x 9) of each, the outermost left
    assert found.weights[[0, 29]].tolist() == pytest.approx([4 / 3, 2 / 3])  # 20 and 10 of 30
    assert not select(labels, distances, np.arange(30), trim=0.1, choice="random").kept[[18, 19, 29]].any()


def test_dropped_rows_are_in_no_size():
    labels = np.repeat([0, 1], [20, 10])
    dropped = np.arange(30) < 10
    found = select(labels, np.arange(30.0), np.arange(30), dropped=dropped)
    assert found.kept.sum() == 20 and not found.kept[:10].any() and set(found.weights) == {1.0}


def test_a_budget_is_a_share_of_all_samples():
    """10 of 40 rows are dropped: .4 of 40 are 16, of the 30 that are left."""
    labels, dropped = np.repeat([0, 1], 20), np.arange(40) % 4 == 0
    for quota in ("equal", "proportional"):
        assert select(labels, np.arange(40.0), np.arange(40), dropped=dropped, keep=0.4, quota=quota).kept.sum() == 16
    with pytest.raises(ValueError, match="keep 0.8 needs 32 samples, but 30 of 40 are left after"):
        select(labels, np.arange(40.0), np.arange(40), dropped=dropped, keep=0.8, quota="proportional")
    PlanSettings(keep=0.1, trim=0.9)  # 1 - .9 is a little less than .1
