"""A loss that is not finite: how many such steps are borne, what is said, what is kept; and memory that runs out."""

import json
from pathlib import Path

import pytest
import torch

from cluster_ds.recipe_file import load_recipe

from .ranks import run_on_ranks
from .test_training import write_recipe

pytestmark = pytest.mark.distributed
RUNS = {  # name -> (overrides, steps in which rank 1 has no finite loss)
    "bf16_one": (["deepspeed.config=zero2", "train.max_nonfinite_steps=1"], {3}),
    "bf16_two": (["deepspeed.config=zero2", "train.max_nonfinite_steps=1"], {3, 4}),
    "bf16_none": (["deepspeed.config=zero2"], {5}),
    "fp32": (["deepspeed.config=zero0", "train.precision=fp32", "train.max_nonfinite_steps=9"], {5}),
    "memory": (["deepspeed.config=zero2"], {5}),
}


def run(rank, world, folder, recipe_path):
    import torch.distributed as dist

    from cluster_ds.distributed import Ranks
    from cluster_ds.engine import ClusterEngine
    from cluster_ds.prepare import prepare
    from cluster_ds.training import train

    ranks = Ranks(rank, world, rank, dist.distributed_c10d._get_default_store())
    forward, out = ClusterEngine.__call__, {}
    for name, (overrides, steps) in RUNS.items():

        def spoiled(engine, batch, name=name, steps=steps):
            loss = forward(engine, batch)
            if batch["step"] + 1 in steps and rank == 1:
                if name == "memory":
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
                engine._sums[0] += float("nan")
                return loss * float("nan")
            if name == "memory" and batch["step"] + 1 in steps:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return loss

        ClusterEngine.__call__ = spoiled
        recipe = load_recipe(recipe_path, overrides)
        output = Path(folder, name)
        prepared = prepare(recipe, output, ranks)
        try:
            train(recipe, prepared, output, ranks)
            out[name] = "finished"
        except ValueError as error:
            out[name] = str(error)
        ranks.gather(True)
    return out


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nonfinite")
    return folder, run_on_ranks(run, 2, str(folder), write_recipe(folder, True))[0]


def ids_of(folder, name, step):
    from cluster_ds.plan import Plan

    entries = [json.loads(line) for line in (folder / name / "census.jsonl").read_text().splitlines()]
    plan = Plan.read(folder / name / "plan")
    return [plan.ids[row] for row in entries[step - 1]["rows"]]


def test_a_step_that_is_left_out_is_borne(found):
    folder, out = found
    assert out["bf16_one"] == "finished"
    assert (folder / "bf16_one" / "model").is_dir()


@pytest.mark.parametrize(("name", "step"), [("bf16_two", 4), ("bf16_none", 5), ("fp32", 5)])
def test_more_stop_the_run_and_name_the_samples(found, name, step):
    folder, out = found
    ids = ids_of(folder, name, step)
    assert len(ids) == 8
    assert out[name].startswith(f"step {step}: loss nan, gradient norm ") and ", ".join(ids) in out[name]
    assert "nothing was saved since the last checkpoint" in out[name]
    assert [p.name for p in (folder / name / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_no_memory_says_what_to_change(found):
    assert found[1]["memory"].startswith("out of memory in training: lower train.micro_batch_size from 2 to 1")
    assert "set train.gradient_checkpointing to true" in found[1]["memory"] and "2 GiB" in found[1]["memory"]
