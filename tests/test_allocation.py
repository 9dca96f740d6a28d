"""Packing and dealing: by hand, and as properties over all ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster_ds.allocation import Allocator, Packing, deal
from cluster_ds.schedule import Schedule
from cluster_ds.tokens import pack_batch

from .conftest import hand_plan


def test_packs_by_hand():
    """Six samples in packs of 10, two packs a micro-batch, on two ranks that share them by their lengths."""
    plan = hand_plan([0] * 6, num_tokens=[9, 5, 5, 4, 3, 2])
    schedule = Schedule(plan, global_batch_size=6)
    batch = schedule.batch(0)
    first, second = Allocator(2, "tokens", packing=Packing(10, 20)).cut(schedule, batch)
    assert len(first) == len(second) == 1  # 9 | 5, 5 | 4 to the first, 3 to the second, 2 to the first
    lengths = [sorted(plan.num_tokens[part.rows].tolist()) for part in (*first, *second)]
    assert lengths == [[2, 4, 9], [3, 5, 5]]
    packs = [sorted(np.bincount(part.pack, plan.num_tokens[part.rows]).tolist()) for part in (*first, *second)]
    assert packs == [[6.0, 9.0], [5.0, 8.0]]
    one, other = Allocator(2, "tokens", packing=Packing(10, 10)).cut(schedule, batch)  # a pack a micro-batch: two of them
    assert [len(one), len(other)] == [2, 2] and not any(part.is_filler.any() for part in (*one, *other))


def test_dealing_by_hand():
    assert [hand.tolist() for hand in deal(np.array([5.0, 4, 3, 3, 3]), 2)] == [[0, 3], [1, 2, 4]]
    assert [hand.tolist() for hand in deal(np.array([9.0, 1, 1, 1]), 2, most=2)] == [[0, 3], [1, 2]]
    assert [hand.tolist() for hand in deal(np.array([1.0]), 2)] == [[0], []]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=3, max_size=60), world=st.sampled_from([1, 2, 3, 4]), seed=st.integers(0, 3),
    most=st.integers(40, 100), packs=st.integers(1, 3), allocation=st.sampled_from(["cluster", "tokens"]),
)
def test_every_sample_once_in_packs_that_fit(lengths, world, seed, most, packs, allocation):
    rng = np.random.default_rng(seed)
    clusters = np.sort(rng.integers(0, 3, len(lengths)))
    plan = hand_plan(np.unique(clusters, return_inverse=True)[1], num_tokens=lengths, weights=rng.random(len(lengths)) + 0.5)
    size = max(plan.num_clusters, int(rng.integers(1, len(lengths) + 1)))
    schedule = Schedule(plan, global_batch_size=size, seed=seed)
    allocator = Allocator(world, allocation, packing=Packing(most, packs * most + 7), quadratic_cost=0.01)
    for step in range(schedule.num_steps):
        batch = schedule.batch(step)
        ranks = allocator.cut(schedule, batch)
        assert len({len(parts) for parts in ranks}) == 1  # as many micro-batches on every rank
        real = [(row, weight) for parts in ranks for p in parts for row, weight in zip(p.rows[~p.is_filler], p.weights[~p.is_filler],
                                                                                     strict=True)]
        assert sorted(real) == sorted(zip(batch.rows, batch.weights, strict=True))
        for parts in ranks:
            num_real = sum(int((~p.is_filler).sum()) for p in parts)
            num_fillers = sum(int(p.is_filler.sum()) for p in parts)
            assert num_fillers == max(0, len(parts) - num_real)  # only where a rank has fewer samples than micro-batches
            for p in parts:
                assert (p.weights[p.is_filler] == 0).all() and len(p.rows) > 0
                loads = np.bincount(p.pack, plan.num_tokens[p.rows])
                assert (loads > 0).all() and loads.max() <= most and len(loads) <= packs


def test_a_sample_longer_than_a_pack_is_named():
    schedule = Schedule(hand_plan([0, 0], num_tokens=[5, 11]), global_batch_size=2)
    with pytest.raises(ValueError, match="has 11 tokens, more than a pack of 10: raise train.max_tokens or lower data.max_length"):
        Allocator(1, packing=Packing(10, 10)).cut(schedule, schedule.batch(0))
    with pytest.raises(ValueError, match="packs of 10 tokens do not fit into tokens_per_micro_batch 9"):
        Packing(10, 9)
    with pytest.raises(ValueError, match="allocation 'even': cluster or tokens"):
        Allocator(1, "even")


@pytest.mark.parametrize("packing", [None, Packing(400, 1600)])
def test_tokens_finish_together_where_clusters_do_not(packing):
    """Lengths of clusters as real proxies find them: long ones in one, short ones in another; costs with attention."""
    rng = np.random.default_rng(0)
    clusters = np.repeat([0, 1, 2, 3], 64)
    lengths = rng.integers([200, 100, 40, 10], [400, 300, 120, 60], size=(64, 4)).T.ravel()
    schedule = Schedule(hand_plan(clusters, num_tokens=lengths), global_batch_size=64)

    def skew(allocation):
        allocator = Allocator(4, allocation, 4, packing, quadratic_cost=1e-4)
        loads = [allocator.loads(schedule.plan, allocator.cut(schedule, schedule.batch(step))) for step in range(4)]
        return max(load.max() / load.mean() for load in loads)

    assert skew("cluster") > 1.5 and skew("tokens") < 1.05


def test_lines_of_a_pack_by_hand():
    samples = [{"input_ids": [7, 8, 9], "labels": [7, 8, 9]}, {"input_ids": [5], "labels": [5]}, {"input_ids": [1, 2], "labels": [-100, 2]}]
    out = pack_batch(samples, np.array([0, 1, 0]), pad_id=3)
    assert out["input_ids"].tolist() == [[7, 8, 9, 1, 2], [5, 3, 3, 3, 3]]
    assert out["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    assert out["labels"].tolist() == [[-100, 8, 9, -100, 2], [-100] * 5]  # nothing is asked of the sample before
    assert out["sample"].tolist() == [[0, 0, 0, 2, 2], [1, 0, 0, 0, 0]]
