import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster_ds.allocation import Allocator, accumulation_steps
from cluster_ds.schedule import Schedule, epoch_order

from .conftest import hand_plan


class Share:
    """A rank's padded micro-batches as arrays [G, micro_batch_size]."""

    def __init__(self, parts):
        self.rows, self.weights, self.is_filler = (np.stack([getattr(p, k) for p in parts]) for k in ("rows", "weights", "is_filler"))


def shares(schedule, step, world, micro, allocation):
    batch = schedule.batch(step)
    return batch, [Share(parts) for parts in Allocator(world, allocation, micro).cut(schedule, batch)]


def test_one_epoch_by_hand():
    # Two strata of 2 and 4: keys .25 .75 and .125 .375 .625 .875, so the order of strata is 1 0 1 1 0 1.
    strata = np.array([0, 1, 1, 0, 1, 1])
    assert strata[epoch_order(strata, seed=0, epoch=0)].tolist() == [1, 0, 1, 1, 0, 1]


def test_orders_differ_between_epochs_and_seeds():
    strata = np.repeat([0, 1], 50)
    orders = {tuple(epoch_order(strata, seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(orders) == 6
    assert all(sorted(order) == list(range(100)) for order in orders)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(3, 40), min_size=1, max_size=6),
    micro=st.sampled_from([1, 2, 4]),
    world=st.sampled_from([1, 2, 3, 4]),
    accumulation=st.integers(1, 3),
    normalization=st.sampled_from(["sample_mean", "token_mean"]),
    allocation=st.sampled_from(["cluster", "tokens"]),
    seed=st.integers(0, 5),
)
def test_epochs_are_complete_weighted_and_evenly_cut(counts, micro, world, accumulation, normalization, allocation, seed):
    size = micro * world * accumulation
    clusters = np.repeat(np.arange(len(counts)), counts)
    if size < len(counts) or size > len(clusters):
        return
    rng = np.random.default_rng(seed)
    plan = hand_plan(clusters, num_tokens=rng.integers(3, 60, len(clusters)), weights=rng.random(len(clusters)) + 0.5)
    schedule = Schedule(plan, global_batch_size=size, epochs=2, seed=seed, normalization=normalization)
    total = len(clusters)
    for epoch in (0, 1):
        seen, masses, occurs, shares_of = [], [], [], []
        for step in range(epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch):
            batch, ranks = shares(schedule, step, world, micro, allocation)
            rows = np.concatenate([r.rows[~r.is_filler] for r in ranks])
            weights = np.concatenate([r.weights[~r.is_filler] for r in ranks])
            assert sorted(rows) == sorted(batch.rows)  # union of the ranks, nothing twice
            assert {r.rows.shape for r in ranks} == {(accumulation, micro)}  # equal work in samples
            fillers = np.concatenate([r.rows[r.is_filler] for r in ranks])
            assert len(fillers) == size - len(batch.rows)
            assert all(r.weights[r.is_filler].sum() == 0 for r in ranks)
            assert (plan.num_tokens[fillers] == plan.num_tokens.min()).all()
            in_batch = np.bincount(clusters[rows], minlength=len(counts))
            expected = np.array(counts) * len(rows) / total
            assert (np.abs(in_batch - expected) < 1.5 + len(counts) * np.array(counts) / sum(counts)).all()
            mass = np.bincount(clusters[rows], weights=weights / plan.weight[rows], minlength=len(counts))
            masses.append(mass)
            occurs.append(in_batch > 0)
            shares_of.append((expected, in_batch))
            tokens = plan.num_supervised_tokens[rows]
            denominator = len(rows) if normalization == "sample_mean" else (weights * tokens).sum()
            assert batch.denominator == pytest.approx(denominator)
            seen.append(rows)
        assert sorted(np.concatenate(seen)) == list(range(total))
        everywhere = np.all(occurs, axis=0)  # a stratum counts alike in all batches, if it is in all
        for mass, (expected, in_batch) in zip(masses, shares_of, strict=True):
            np.testing.assert_allclose(mass, np.where(everywhere, expected, in_batch))
        np.testing.assert_allclose(np.sum(masses, axis=0), counts)  # over the epoch each has the plan's weight
    assert schedule.num_steps == 2 * -(-total // size)


def test_the_sequence_does_not_depend_on_the_number_of_ranks():
    plan = hand_plan(np.repeat([0, 1, 2], [7, 9, 5]), num_tokens=np.arange(21) + 3)
    schedule = Schedule(plan, global_batch_size=8, epochs=3)
    for step in range(schedule.num_steps):
        found = {}
        for world in (1, 2, 4):
            for allocation in ("cluster", "tokens"):
                batch, ranks = shares(schedule, step, world, 2, allocation)
                pairs = [
                    p for r in ranks for p in zip(r.rows.ravel(), r.weights.ravel(), r.is_filler.ravel(), strict=True)
                ]
                found[world, allocation] = sorted((row, weight) for row, weight, filler in pairs if not filler)
        assert len({tuple(v) for v in found.values()}) == 1


def test_short_last_batch_by_hand():
    # 21 samples, batches of 8: 8, 8, 5, and the last has at most 3 fillers.
    schedule = Schedule(hand_plan([0] * 21), global_batch_size=8)
    assert [len(schedule.batch(s).rows) for s in range(3)] == [8, 8, 5]
    assert [schedule.batch(s).denominator for s in range(3)] == [8.0, 8.0, 5.0]
    for world in (1, 2, 4):
        _, ranks = shares(schedule, 2, world, 2, "cluster")
        assert sum(int(r.is_filler.sum()) for r in ranks) == 3
        per_rank = [int((~r.is_filler).sum()) for r in ranks]
        assert max(per_rank) - min(per_rank) <= 1


def test_cluster_allocation_gives_each_rank_its_own_clusters():
    plan = hand_plan(np.repeat([0, 1, 2, 3], 16))
    schedule = Schedule(plan, global_batch_size=16)
    for world, expected in ((4, [{0}, {1}, {2}, {3}]), (2, [{0, 1}, {2, 3}])):
        for step in range(schedule.num_steps):
            _, ranks = shares(schedule, step, world, 2, "cluster")
            assert [set(plan.cluster[r.rows].ravel()) for r in ranks] == expected
            if world == 2:  # interleaved: every micro-batch mixes the rank's clusters
                assert all(len(set(plan.cluster[micro])) == 2 for r in ranks for micro in r.rows)


def test_token_allocation_finishes_together():
    rng = np.random.default_rng(0)
    clusters = np.repeat([0, 1], 64)
    lengths = np.where(clusters == 0, rng.integers(200, 400, 128), rng.integers(10, 60, 128))
    schedule = Schedule(hand_plan(clusters, num_tokens=lengths), global_batch_size=32)

    def skew(allocation):
        loads = []
        for step in range(schedule.num_steps):
            _, ranks = shares(schedule, step, 2, 4, allocation)
            tokens = [lengths[r.rows].sum() for r in ranks]
            loads.append(max(tokens) / np.mean(tokens))
        return max(loads)

    assert skew("cluster") > 1.6 and skew("tokens") < 1.02


def test_a_rare_stratum_keeps_its_share_of_the_epoch():
    """5 of 100 samples stand for half of the data: in batches of 10 they are in every other one."""
    weights = np.repeat([50 / 95, 50 / 5], [95, 5])
    plan = hand_plan(np.repeat([0, 1], [95, 5]), weights=weights)
    schedule = Schedule(plan, global_batch_size=10)
    batches = [schedule.batch(step) for step in range(10)]
    rare = [batch.weights[plan.cluster[batch.rows] == 1] for batch in batches]
    assert sorted(len(r) for r in rare) == [0] * 5 + [1] * 5 and all((r == 10).all() for r in rare)
    common = [batch.weights[plan.cluster[batch.rows] == 0].sum() for batch in batches]
    np.testing.assert_allclose(common, 5)  # alike in every batch, whether it holds nine or ten
    assert sum(r.sum() for r in rare) == pytest.approx(sum(common)) == pytest.approx(50)


def test_dropped_samples_are_never_drawn():
    kept = np.arange(40) % 3 != 0
    schedule = Schedule(hand_plan(np.arange(40) % 2, kept=kept), global_batch_size=6)
    rows = np.concatenate([schedule.batch(s).rows for s in range(schedule.num_steps)])
    assert sorted(rows) == np.flatnonzero(kept).tolist()


def test_refusals_name_both_numbers_and_the_remedy():
    plan = hand_plan(np.repeat(np.arange(4), 5))
    with pytest.raises(ValueError, match="global_batch_size 3 is smaller than the 4 clusters"):
        Schedule(plan, global_batch_size=3)
    with pytest.raises(ValueError, match="kept 20 samples, fewer than global_batch_size 64"):
        Schedule(plan, global_batch_size=64)
    with pytest.raises(ValueError, match=r"global_batch_size 24 is not a multiple of micro_batch_size 5 x 4 ranks = 20") as e:
        accumulation_steps(24, 5, 4)
    assert "global_batch_size 20 or 40" in str(e.value) and "micro_batch_size 1, 2, 3, 6" in str(e.value)
    assert accumulation_steps(512, 2, 4) == 64


def test_another_draw_every_epoch_is_a_function_of_seed_and_epoch(tmp_path):
    from cluster_ds.plan import Plan, random_part
    from cluster_ds.planning import make_plan

    x = np.random.default_rng(0).normal(size=(400, 6))
    ids = [f"s{i:03d}" for i in range(400)]
    settings = {"num_clusters": 4, "alpha": 4.0, "keep": 0.25, "quota": "proportional", "choice": "random", "redraw": "epoch"}
    plan = make_plan(x, ids, np.full(400, 9), trim=0.1, **settings)
    counts = np.bincount(plan.cluster[plan.kept])
    for arm in (plan, random_part(plan, 100, seed=3, redraw=True)):
        epochs = [arm.kept_in(epoch) for epoch in range(8)]
        assert (epochs[0] == arm.kept).all() and not (epochs[1] == epochs[2]).all()
        assert all(kept.sum() == 100 and not kept[~arm.pool].any() for kept in epochs)
        assert np.any(epochs, axis=0).sum() > 300  # eight quarters cover .9 of 400, but for chance
        schedule = Schedule(arm, global_batch_size=16, epochs=3)
        assert schedule.num_steps == 21
        seen = [np.concatenate([schedule.batch(e * 7 + s).rows for s in range(7)]) for e in range(3)]
        for epoch in range(3):
            assert sorted(seen[epoch]) == np.flatnonzero(arm.kept_in(epoch)).tolist()
        for world in (1, 2, 4):  # ranks only cut it
            batch, cut = shares(schedule, 9, world, 2, "tokens")
            assert sorted(np.concatenate([c.rows.ravel() for c in cut])) == sorted(batch.rows)
        # The position is one integer: a new schedule in the middle gives what the first one gave.
        again = Schedule(arm, global_batch_size=16, epochs=3).batch(10)
        np.testing.assert_array_equal(again.rows, schedule.batch(10).rows)
        np.testing.assert_array_equal(again.weights, schedule.batch(10).weights)
    assert all((np.bincount(plan.cluster[plan.kept_in(e)]) == counts).all() for e in range(5))
    plan.write(tmp_path / "plan")
    read = Plan.read(tmp_path / "plan")
    assert read.hash == plan.hash and (read.kept_in(2) == plan.kept_in(2)).all()
    assert f"drawn anew each epoch from {plan.pool.sum()}" in read.lines()[1]
    fixed = make_plan(x, ids, np.full(400, 9), trim=0.1, **{**settings, "redraw": "none"})
    assert (fixed.kept == plan.kept).all() and fixed.hash != plan.hash and (fixed.kept_in(3) == fixed.kept).all()
