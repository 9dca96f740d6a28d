"""The same selection and the same training on a GPU, up to rounding; skipped where there is none."""

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from cluster_ds.distributed import Ranks, on_gpu
from cluster_ds.models import attention_of, compile_layers
from cluster_ds.planning import make_plan
from cluster_ds.proxy import extract
from cluster_ds.recipe import ModelSection
from cluster_ds.shards import read_proxies

from .conftest import hand_plan, in_order, random_samples, tiny_llama
from .distributed.ranks import run_on_ranks
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


def train_tiny(rank, world, stage, precision, packed, compiled, attention):
    """Losses of four steps, and the weights behind them."""
    import deepspeed

    import cluster_ds

    device = torch.device("cuda", rank) if on_gpu() else torch.device("cpu")
    samples = random_samples(32, seed=3)
    plan = hand_plan(
        np.arange(32) % 2, num_tokens=[len(s["input_ids"]) for s in samples], ids=[s["id"] for s in samples],
        num_supervised=[int((s["labels"][1:] != -100).sum()) for s in samples],
    )
    config = {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
    config |= {} if packed else {"train_micro_batch_size_per_gpu": 2}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32" if stage else "bf16"}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = tiny_llama(head_dim=16, attn_implementation=attention).to(device, dtype)
    if compiled:
        compile_layers(model)
    torch.set_float32_matmul_precision("highest")
    engine, _, loader, _ = cluster_ds.initialize(
        model=model, config=config, dataset=samples, plan=plan, allocation="tokens",
        packing=cluster_ds.Packing(48, 96) if packed else None,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=on_gpu()),
    )
    losses = []
    for batch in loader:
        engine.backward(engine(batch))
        if engine.step():
            losses.append(engine.last_loss)
    parameters = list(engine.engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):  # collective
        weights = torch.cat([p.detach().float().cpu().flatten() for p in parameters])
    return losses, weights


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_training_is_that_of_the_cpu(stage, packed):
    how = (stage, "fp32", packed, False, "sdpa")
    (losses, weights), (expected, expected_weights) = (
        run_on_ranks(train_tiny, 1, *how, backend=backend)[0] for backend in ("nccl", "gloo")
    )
    assert losses == pytest.approx(expected, rel=1e-4)
    start = torch.cat([p.detach().flatten() for p in tiny_llama(head_dim=16).parameters()])
    assert (weights - expected_weights).norm() < 1e-3 * (expected_weights - start).norm()


@pytest.mark.parametrize("kind", ["compiled", "flash-attention"])
def test_faster_ways_give_the_same_losses(kind):
    """Packed, bf16: to its rounding."""
    if kind == "flash-attention":
        if attention_of(ModelSection(name_or_path="x", attn_implementation="flash_attention_2")) == "sdpa":
            pytest.skip("flash-attention is not installed")
        fast = (2, "bf16", True, False, "flash_attention_2")
    else:
        fast = (2, "bf16", True, True, "sdpa")
    found, expected = (run_on_ranks(train_tiny, 1, *how, backend="nccl")[0][0] for how in (fast, (2, "bf16", True, False, "sdpa")))
    assert found == pytest.approx(expected, abs=0.03)
