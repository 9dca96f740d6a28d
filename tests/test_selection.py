import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_ds.selection import cluster_weights, quota_per_cluster, select, selection_bias

LABELS = np.array([0, 0, 0, 0, 1, 1])
DISTANCES = np.array([0.1, 0.4, 0.2, 0.4, 0.5, 0.3])
IDS = list("abcdef")


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
    assert quota_per_cluster(np.array([100, 110]), 0.29, None) == 29  # 0.29 * 100 is 28.999999999999996


def test_budget_beyond_the_smallest_cluster_names_the_limit():
    with pytest.raises(ValueError, match=r"keep 0.9 needs 2 samples of every cluster.*cluster 1 has 1.*at most 0.4 "):
        quota_per_cluster(np.array([4, 1]), None, 0.9)


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
    shift, cosines = selection_bias(skewed, found, labels)
    full, seen = skewed.mean(0), np.average(skewed[found.kept], axis=0, weights=found.weights[found.kept])
    assert shift == pytest.approx(np.linalg.norm(seen - full) / np.linalg.norm(full), rel=1e-9) and shift > 0.3
    assert cosines.max() < 1.0


def test_the_bias_without_weights_is_the_one_of_what_is_trained():
    features = np.repeat([[1.0, 0.0], [0.0, 1.0]], [900, 100], axis=0)
    labels = np.repeat([0, 1], [900, 100])
    ids = [f"{i:04d}" for i in range(1000)]
    with pytest.warns(UserWarning, match="cluster 1 has 100"):
        weighted, plain = (select(labels, np.zeros(1000), ids, weighting=w) for w in ("cluster", "none"))
    assert selection_bias(features, weighted, labels)[0] == pytest.approx(0.0, abs=1e-12)
    # Without weights the mean is (.5, .5) instead of (.9, .1).
    assert selection_bias(features, plain, labels)[0] == pytest.approx(np.hypot(0.4, 0.4) / np.hypot(0.9, 0.1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"choice": "periphral"}, "choice 'periphral': peripheral, random or core"),
        ({"balance": "all"}, "balance 'all': whole or random_first"),
        ({"weighting": "clusters"}, "weighting 'clusters': cluster or none"),
        ({"ratio": 2}, r"ratio 2 is outside \(0, 1\]"), ({"ratio": -1}, "ratio -1 is outside"), ({"keep": 0}, "keep 0 is outside"),
        ({"ratio": 0.5, "keep": 0.5}, "both set the budget"),
    ],
)
def test_misspelt_or_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        select(LABELS, DISTANCES, IDS, **settings)
