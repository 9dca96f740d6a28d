"""A run that goes from 2 ranks to 1 and to 4: the same samples in the same order, and the unbroken run's weights."""

import contextlib
from pathlib import Path

import pytest
import torch

from cluster_ds.recipe_file import load_recipe

from .ranks import run_on_ranks
from .test_training import model_of, reload, write_recipe

pytestmark = pytest.mark.distributed
FP32 = ["train.precision=fp32", "train.weight_decay=0.1", "train.epochs=3"]
RUNS = {  # stage 3 first: zero.Init must not live on what another run initialised
    "stage3": ["deepspeed.config=zero3", *FP32],
    "stage3_lora": ["deepspeed.config=zero3", "model.lora.rank=4", "train.lr=1e-2", *FP32],
    "stage0": ["deepspeed.config=zero0", *FP32],
    "stage1": ["deepspeed.config=zero1", *FP32],
    "stage2": ["deepspeed.config=zero2", *FP32],
    "stage2_packed": ["deepspeed.config=zero2", "train.packing=true", "train.tokens_per_micro_batch=96", *FP32],
    "stage2_lora": ["deepspeed.config=zero2", "model.lora.rank=4", "train.lr=1e-2", *FP32],
    "stage2_bf16": ["deepspeed.config=zero2", "train.epochs=3"],
}
PARTS = ((2, 3), (1, 6), (4, None))  # ranks, and behind which step they are stopped


def run_part(rank, world, folder, recipe_file, until):
    import torch.distributed as dist

    from cluster_ds import training
    from cluster_ds.distributed import Ranks
    from cluster_ds.prepare import prepare
    from cluster_ds.watch import Stopped

    ranks = Ranks(rank, world, rank, dist.distributed_c10d._get_default_store())
    save = training.save_checkpoint

    def save_and_stop(engine, where, step, *how):
        save(engine, where, step, *how)
        if step == until:
            raise Stopped(step)

    training.save_checkpoint = save_and_stop
    for name, overrides in RUNS.items():
        recipe, output = load_recipe(recipe_file, overrides), Path(folder, name)
        with contextlib.suppress(Stopped):
            training.train(recipe, prepare(recipe, output, ranks), output, ranks)


def refused_part(rank, world, folder, recipe_file):
    """On 2 ranks, from a checkpoint of 4."""
    import torch.distributed as dist

    from cluster_ds.distributed import PeerError, Ranks
    from cluster_ds.prepare import prepare
    from cluster_ds.training import train

    ranks = Ranks(rank, world, rank, dist.distributed_c10d._get_default_store())
    config = Path(folder, "robin.json")
    config.write_text('{"zero_optimization": {"stage": 2, "round_robin_gradients": true}}')
    recipe = load_recipe(recipe_file, [f"deepspeed.config={config}", *FP32])
    output = Path(folder, "stage2")
    try:
        train(recipe, prepare(recipe, output, ranks), output, ranks, "step-00000009")
    except (ValueError, PeerError) as error:
        return str(error)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    recipe = write_recipe(folder, True)
    run_on_ranks(run_part, 2, str(folder / "unbroken"), recipe, None)
    for world, until in PARTS:
        run_on_ranks(run_part, world, str(folder / "changing"), recipe, until)
    return folder, recipe


@pytest.mark.parametrize("name", RUNS)
def test_the_same_samples_and_weights(runs, name):
    folder, _ = runs
    texts = [(folder / kind / name / "census.jsonl").read_text() for kind in ("unbroken", "changing")]
    assert texts[0] == texts[1] and texts[0].count("\n") == 9
    a, b = (dict(reload(folder / kind, name).named_parameters()) for kind in ("unbroken", "changing"))
    start = dict(model_of(True).named_parameters())
    update = torch.cat([(p - start[n]).flatten() for n, p in a.items()]).norm()
    difference = torch.cat([(p - b[n]).flatten() for n, p in a.items()]).norm()
    assert update > 1e-2
    assert difference <= (5e-2 if "bf16" in name else 1e-5) * update, float(difference / update)  # bf16 rounds by order


def test_nothing_of_the_conversion_is_left_and_what_cannot_be_converted_is_refused(runs):
    folder, recipe = runs
    left = [path.name for path in (folder / "changing" / "stage2" / "checkpoints").iterdir() if "universal" in path.name]
    assert not left
    found = run_on_ranks(refused_part, 2, str(folder / "changing"), recipe)
    assert all("round_robin_gradients gives wrong weights on other ranks" in text for text in found)
    assert "step-00000009 was made by 4 ranks, this run has 2: start 4 ranks, or another --output_dir" in found[0]
