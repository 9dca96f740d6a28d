"""The same selection and the same training on a GPU, up to rounding; skipped where there is none."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from cluster_ds.checkpoint import Keep, find_checkpoint, load_checkpoint, save_checkpoint
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


CASES = [(stage, packed) for stage in (3, 0, 1, 2) for packed in (False, True)]


def build(rank, stage, precision="fp32", packed=True, compiled=False, attention="sdpa", seed=0):
    import cluster_ds

    device = torch.device("cuda", rank) if on_gpu() else torch.device("cpu")
    samples = random_samples(32, seed=3)
    plan = hand_plan(
        np.arange(32) % 2, num_tokens=[len(s["input_ids"]) for s in samples], ids=[s["id"] for s in samples],
        num_supervised=[int((s["labels"][1:] != -100).sum()) for s in samples],
    )
    config = {
        "train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}, "communication_data_type": "fp32",
    }
    config |= {} if packed else {"train_micro_batch_size_per_gpu": 2}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32" if stage else "bf16"}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = tiny_llama(seed=seed, head_dim=16, attn_implementation=attention).to(device, dtype)
    if compiled:
        compile_layers(model)
    torch.set_float32_matmul_precision("highest")
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == matrix], "weight_decay": 0.1 * matrix} for matrix in (True, False)]
    engine, _, loader, _ = cluster_ds.initialize(
        model=model, config=config, dataset=samples, plan=plan, allocation="tokens",
        packing=cluster_ds.Packing(48, 96) if packed else None,
        optimizer=torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, fused=on_gpu()),
    )
    return engine, loader


def train_to(engine, loader, step):
    """Losses up to a step, and the weights behind it."""
    import deepspeed

    losses = []
    for batch in loader if loader.step < step else ():
        engine.backward(engine(batch))
        if engine.step():
            losses.append(engine.last_loss)
            if loader.step == step:
                break
    parameters = list(engine.engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=engine.engine.zero_optimization_stage() == 3):  # collective
        return losses, torch.cat([p.detach().float().cpu().flatten() for p in parameters])


def train_all(rank, world):
    out = {}
    for stage, packed in CASES:
        engine, loader = build(rank, stage, packed=packed)
        out[stage, packed] = train_to(engine, loader, 4)
        engine.engine.destroy()
    return out


def train_faster(rank, world, attention):
    return [
        train_to(*build(rank, 2, "bf16", compiled=compiled, attention=kind), 4)[0]
        for compiled, kind in ((False, "sdpa"), (True, "sdpa"), (False, attention))
    ]


def change_ranks(rank, world, folder, step):
    """Go on from what is in the folder, if anything is, save, and train to the end."""
    ranks = Ranks(rank, world, rank, torch.distributed.distributed_c10d._get_default_store())
    out = {}
    for stage in (3, 1, 2):
        where = Path(folder, str(stage))
        before = find_checkpoint(where).step
        engine, loader = build(rank, stage, seed=0 if before is None else 1)  # other weights than those to be loaded
        if before is not None:
            load_checkpoint(engine, where, before, ranks)
            loader.load_state_dict({"step": before})
        train_to(engine, loader, step)
        save_checkpoint(engine, where, step, {}, ranks, Keep(1))
        out[stage] = train_to(engine, loader, 4)[1]
        engine.engine.destroy()
    return out


def update_error(found, expected):
    start = torch.cat([p.detach().flatten() for p in tiny_llama(head_dim=16).parameters()])
    return float((found - expected).norm() / (expected - start).norm())


@pytest.fixture(scope="module")
def trained():
    return [run_on_ranks(train_all, 1, backend=backend)[0] for backend in ("nccl", "gloo")]


@pytest.mark.parametrize(("stage", "packed"), CASES)
def test_training_is_that_of_the_cpu(trained, stage, packed):
    (losses, weights), (expected, expected_weights) = (found[stage, packed] for found in trained)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert update_error(weights, expected_weights) < 1e-3


def test_compiled_layers_and_flash_attention_give_the_same_losses():
    """Packed, bf16: to its rounding. Where flash-attention is not installed sdpa is compared with itself."""
    attention = attention_of(ModelSection(name_or_path="x", attn_implementation="flash_attention_2"))
    expected, *faster = run_on_ranks(train_faster, 1, attention, backend="nccl")[0]
    for losses in faster:
        assert losses == pytest.approx(expected, abs=0.03)


def test_two_cpu_ranks_go_on_as_one_gpu(tmp_path):
    """A fused AdamW, whose step counters must lie on the device."""
    expected = run_on_ranks(change_ranks, 2, str(tmp_path), 2)[0]
    found = run_on_ranks(change_ranks, 1, str(tmp_path), 3, backend="nccl")[0]
    for stage in (1, 2, 3):
        assert update_error(found[stage], expected[stage]) < 1e-3
