"""The same selection on a GPU, up to rounding; skipped where there is none."""

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from cluster_ds.distributed import Ranks
from cluster_ds.planning import make_plan
from cluster_ds.proxy import extract
from cluster_ds.shards import read_proxies

from .conftest import in_order, random_samples, tiny_llama
from .test_proxy import SETTINGS, Table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def test_clusters_and_weights():
    x = np.random.default_rng(0).normal(size=(5000, 600)) + np.repeat(3 * np.eye(4, 600), 1250, axis=0)
    ids, lengths = [f"s{i:04d}" for i in range(5000)], np.full(5000, 9)
    settings = {"num_clusters": 4, "alpha": 1.1, "weighting": "calibrated"}
    here, there = (make_plan(x, ids, lengths, device=torch.device(d), **settings) for d in ("cpu", "cuda"))
    assert adjusted_rand_score(here.cluster, there.cluster) > 0.99
    assert there.manifest["calibration"]["shift_after"] == pytest.approx(here.manifest["calibration"]["shift_after"], rel=0.05)


def test_proxies(tmp_path):
    samples = Table(random_samples(80, seed=2))
    found = []
    for device in ("cpu", "cuda"):
        ranks = Ranks(0, 1, 0)
        ranks.device = torch.device(device)
        extract(samples, tmp_path / device, lambda device=device: tiny_llama().to(device), ranks, **SETTINGS)
        found.append(in_order(read_proxies(tmp_path / device, samples, 60, "k").features).astype(float))
    assert np.abs(found[0] - found[1]).max() < 5e-3
