import numpy as np
import pytest

import cluster_ds
from cluster_ds.plan import Plan
from cluster_ds.planning import make_plan


def features(n=200, dim=6, seed=0):
    rng = np.random.default_rng(seed)
    groups = rng.choice(4, n, p=[0.4, 0.3, 0.2, 0.1])
    return rng.normal(size=(4, dim))[groups] * 2 + rng.normal(size=(n, dim)) * 0.3


IDS = [f"s{i:03d}" for i in range(200)]
LENGTHS = np.random.default_rng(1).integers(5, 50, 200)


def test_as_the_documentation_shows():
    plan = cluster_ds.make_plan(features(), IDS, LENGTHS, num_clusters=4, ratio=0.5)
    sizes = np.bincount(plan.cluster)
    quota = max(1, int(0.5 * sizes.min()))
    assert np.bincount(plan.cluster[plan.kept]).tolist() == [quota] * 4
    np.testing.assert_allclose(plan.weight, (sizes * 4 / 200)[plan.cluster])
    assert plan.num_supervised_tokens.tolist() == (LENGTHS - 1).tolist()
    far = [plan.distance[(plan.cluster == c) & plan.kept].min() for c in range(4)]
    near = [plan.distance[(plan.cluster == c) & ~plan.kept].max() for c in range(4)]
    assert (np.array(far) >= near).all()  # peripheral


def test_write_and_read(tmp_path):
    plan = make_plan(features(), IDS, LENGTHS, losses=np.arange(200.0))
    plan.write(tmp_path / "plan")
    plan.write(tmp_path / "plan")  # replaced, not refused
    again = Plan.read(tmp_path / "plan")
    assert again.hash == plan.hash and again.ids == plan.ids
    for name in ("cluster", "stratum", "distance", "weight", "kept", "num_tokens", "num_supervised_tokens", "loss"):
        np.testing.assert_array_equal(getattr(again, name), getattr(plan, name))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan"]  # no temporary left


@pytest.mark.parametrize("column", ["cluster", "weight", "kept", "num_supervised_tokens"])
def test_the_hash_sees_what_training_depends_on(column):
    from dataclasses import replace

    plan = make_plan(features(), IDS, LENGTHS)
    changed = getattr(plan, column).copy()
    changed[0] = ~changed[0] if column == "kept" else changed[0] + 1
    assert replace(plan, **{column: changed}).hash != plan.hash


def test_damage_is_named(tmp_path):
    make_plan(features(), IDS, LENGTHS).write(tmp_path / "plan")
    table = tmp_path / "plan" / "table.parquet"
    table.write_bytes(table.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="is damaged.*delete"):
        Plan.read(tmp_path / "plan")
    (tmp_path / "plan" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="manifest.json is not readable: delete"):
        Plan.read(tmp_path / "plan")
    with pytest.raises(ValueError, match="no plan at"):
        Plan.read(tmp_path / "nowhere")


def test_differences_name_both_values():
    plan = make_plan(features(), IDS, LENGTHS, ratio=0.5, provenance={"data": "aa", "model": "m"})
    settings = plan.manifest["selection"]
    assert plan.differences({"data": "aa", "model": "m"}, settings) == []
    assert plan.differences({"data": "bb", "model": "m"}, {**settings, "ratio": 0.75}) == [
        "data: plan 'aa', now 'bb'", "ratio: plan 0.5, now 0.75",
    ]


def test_zero_proxies_are_outside_of_everything():
    points = features()
    points[[3, 50]] = 0.0
    plan = make_plan(points, IDS, LENGTHS)
    assert plan.cluster[[3, 50]].tolist() == [-1, -1] and not plan.kept[[3, 50]].any()
    sizes = np.bincount(plan.cluster[plan.cluster >= 0])
    assert sizes.sum() == 198 and plan.manifest["excluded"] == {"zero proxy": 2, "near-duplicate": 0}
    np.testing.assert_allclose(plan.manifest["weights"], sizes * 4 / 198)


def test_rows_in_another_order_keep_the_same_samples():
    order = np.random.default_rng(2).permutation(200)
    plan = make_plan(features(), IDS, LENGTHS, ratio=0.5)
    other = make_plan(features()[order], [IDS[i] for i in order], LENGTHS[order], ratio=0.5)
    assert {i for i, k in zip(plan.ids, plan.kept, strict=True) if k} == {
        i for i, k in zip(other.ids, other.kept, strict=True) if k
    }
    assert other.cluster.tolist() == plan.cluster[order].tolist()


def test_refusals():
    with pytest.raises(ValueError, match="199 ids"):
        make_plan(features(), IDS[:-1], LENGTHS)
    with pytest.raises(ValueError, match="1 of 200 sample ids repeat"):
        make_plan(features(), [*IDS[:-1], IDS[0]], LENGTHS)
    with pytest.raises(ValueError, match="sample s000 has no supervised token"):
        make_plan(features(), IDS, np.ones(200, dtype=int))
    with pytest.raises(ValueError, match="all 200 features are zero"):
        make_plan(np.zeros((200, 3)), IDS, LENGTHS)
    with pytest.raises(ValueError, match="ids must be text"):
        make_plan(features(), list(range(200)), LENGTHS)
    with pytest.raises(ValueError, match="3 losses for 200"):
        make_plan(features(), IDS, LENGTHS, losses=np.zeros(3))
    points = features()
    points[7, 2] = np.nan
    with pytest.raises(ValueError, match="samples s007"):
        make_plan(points, IDS, LENGTHS)


def test_whole_numbers_are_features_too():
    points = (features() * 10).astype(int)
    assert make_plan(points, IDS, LENGTHS).hash == make_plan(points.astype(np.float32), IDS, LENGTHS).hash
