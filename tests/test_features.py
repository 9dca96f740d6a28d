"""Vectors read block by block: the same numbers wherever they are stored and however many threads compute."""

import numpy as np
import pytest
import torch

import cluster_ds.features as module
from cluster_ds.clustering import cluster
from cluster_ds.features import PROJECTION_DIM, Features, Points, as_features, projection_matrix
from cluster_ds.planning import make_plan


def in_shards(x, sizes, order, projection=True):
    """The rows of `x` in shards, in another order."""
    stored, cuts = x[order], np.cumsum(sizes)[:-1]
    assert sum(sizes) == len(x)
    projected = np.split((stored.astype(np.float32) @ projection_matrix(x.shape[1])).astype(np.float16), cuts)
    return Features(np.split(stored, cuts), order, projected if projection else ())


@pytest.fixture(scope="module")
def vectors():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(4, 400))
    labels = rng.choice(4, 900, p=[0.5, 0.25, 0.15, 0.1])
    x = centers[labels] + rng.normal(size=(900, 400))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float16)


def test_gathering_from_shards(vectors):
    order = np.random.default_rng(1).permutation(900)
    store = in_shards(vectors, [100, 1, 499, 300], order)
    for positions in (np.arange(90, 110), np.arange(900)[::-7].copy(), np.array([100]), np.array([5, 5, 899])):
        got = store.gather(positions, np.empty((len(positions), 400), np.float16))
        np.testing.assert_array_equal(got, vectors[order][positions])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_blocks_come_in_order_and_bits_do_not_depend_on_threads(vectors, monkeypatch, threads):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 400 * 64)
    points = Points(as_features(vectors), np.arange(900)[::-1].copy(), np.linspace(1, 2, 900))
    monkeypatch.setattr(module, "num_threads", lambda: threads)
    spans, parts = zip(*points.map_blocks(lambda _, block, __: block.numpy().copy()), strict=True)
    assert [s.start for s in spans] == list(range(0, 900, 64)) and spans[-1].stop == 900
    expected = vectors[::-1].astype(np.float64) * np.linspace(1, 2, 900)[:, None]
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    np.testing.assert_allclose(points.norms(), np.linalg.norm(expected, axis=1), rtol=1e-12)


def test_an_error_in_a_block_comes_out(vectors, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 400 * 64)

    def work(span, *_):
        if span.start == 128:
            raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        list(Points(as_features(vectors), np.arange(900)).map_blocks(work))


def test_labels_do_not_depend_on_threads(vectors, monkeypatch):
    import cluster_ds.clustering as clustering

    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 400 * 64)
    found = {}
    for threads in (1, 4):
        monkeypatch.setattr(module, "num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(clustering, "num_threads", lambda threads=threads: threads)
        found[threads] = cluster(vectors, 4, alpha=1.1)
    np.testing.assert_array_equal(found[1].labels, found[4].labels)
    np.testing.assert_array_equal(found[1].distances, found[4].distances)


@pytest.mark.parametrize("projection", [True, False])
def test_a_plan_from_shards_is_the_plan_from_the_array(vectors, projection):
    ids, lengths = [f"s{i:04d}" for i in range(900)], np.full(900, 9)
    vectors = vectors.copy()
    vectors[[3, 700]] = 0.0
    order = np.random.default_rng(2).permutation(900)
    settings = {"num_clusters": 4, "alpha": 1.2, "ratio": 0.6, "quota": "neyman", "trim": 0.05}
    norms = np.random.default_rng(3).random(900) + 0.5
    whole = make_plan(vectors, ids, lengths, norms=norms, **settings)
    shards = make_plan(in_shards(vectors, [250, 250, 400], order, projection), ids, lengths, norms=norms, **settings)
    np.testing.assert_array_equal(shards.cluster, whole.cluster)
    np.testing.assert_array_equal(shards.kept, whole.kept)
    np.testing.assert_allclose(shards.distance, whole.distance, rtol=1e-6)
    np.testing.assert_allclose(shards.weight, whole.weight, rtol=1e-12)
    assert shards.manifest["counts"] == whole.manifest["counts"] and shards.cluster[3] == -1


def test_a_memory_map_is_read_and_not_loaded(vectors, tmp_path):
    np.save(tmp_path / "x.npy", vectors)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert isinstance(as_features(mapped).parts[0], np.memmap)
    ids = [f"s{i:04d}" for i in range(900)]
    assert make_plan(mapped, ids, np.full(900, 9)).hash == make_plan(vectors, ids, np.full(900, 9)).hash


def test_the_projection_keeps_distances():
    x = np.random.default_rng(4).normal(size=(200, 2000))
    projected = x @ projection_matrix(2000)
    ratio = np.linalg.norm(projected[:100] - projected[100:], axis=1) / np.linalg.norm(x[:100] - x[100:], axis=1)
    assert abs(ratio.mean() - 1) < 0.02 and ratio.std() < 1.5 / np.sqrt(2 * PROJECTION_DIM)


def test_torch_threads_are_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with module.one_thread_a_block():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
