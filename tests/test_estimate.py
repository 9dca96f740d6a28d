"""Memory against DeepSpeed's table of states, shapes against transformers, and time against hand-worked schedules."""

import numpy as np
import pytest

from cluster_ds.ds_config import resolve_config
from cluster_ds.estimate import arms_of, loads_of_arms, loads_of_steps, memory_per_gpu, steps_text, total_bytes
from cluster_ds.recipe import TrainSection
from cluster_ds.recipe_file import load_recipe
from cluster_ds.shapes import DATASET_ROWS, SHAPES, ModelShape

from .conftest import hand_plan, tiny_llama

SEVEN, THIRTEEN = SHAPES["codellama/CodeLlama-7b-Python-hf"], SHAPES["codellama/CodeLlama-13b-Python-hf"]


def train_section(**changes):
    return TrainSection(**{"epochs": 2, "global_batch_size": 512, "micro_batch_size": 4, "lr": 5e-5, **changes})


def test_shapes_count_as_transformers_does():
    assert SEVEN.num_parameters == 6_738_415_616 and THIRTEEN.num_parameters == 13_015_864_320
    model = tiny_llama()
    shape = ModelShape(2, 32, 48, 4, 2, 64)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    layer = model.model.layers[0]
    assert shape.layer_parameters == sum(p.numel() for p in layer.parameters())
    matrices = [p.shape for p in model.parameters() if p.ndim == 2]
    assert shape.factored_parameters == sum(r + c for r, c in matrices) + sum(p.numel() for p in model.parameters() if p.ndim == 1)


@pytest.mark.parametrize(
    ("config", "precision", "optimizer", "expected"),
    [  # parameters, gradients and optimizer in GB at 7B W=4, W=8, 13B W=4, W=8: shared arithmetic of DeepSpeed 0.19.8
        ("zero0", "bf16", "adamw", (135, 135, 260, 260)),
        ("zero0", "bf16_autocast", "adamw", (108, 108, 208, 208)),
        ("zero0", "bf16_autocast", "adafactor", (54, 54, 104, 104)),
        ("zero0", "bf16", "adafactor", (81, 81, 156, 156)),
        ("zero0", "pure_bf16", "adafactor", (27, 27, 52, 52)),
        ("zero1", "bf16", "adamw", (47, 37, 91, 72)),
        ("zero2", "bf16", "adamw", (37, 25, 72, 49)),
        ("zero3", "bf16", "adamw", (27, 13, 52, 26)),
    ],
)
def test_states_are_those_of_the_table(config, precision, optimizer, expected):
    train = train_section(precision=precision, optimizer=optimizer)
    for (shape, world_size), size in zip(((SEVEN, 4), (SEVEN, 8), (THIRTEEN, 4), (THIRTEEN, 8)), expected, strict=True):
        needed = memory_per_gpu(shape, train, resolve_config(config, train, world_size), world_size, 1024)
        states = sum(needed[name] for name in ("parameters", "gradients", "optimizer"))
        assert states / 1e9 == pytest.approx(size, abs=0.7)


def test_offload_moves_the_states_to_the_host():
    train = train_section(precision="bf16")
    on_gpu = memory_per_gpu(THIRTEEN, train, resolve_config("zero3", train, 4), 4, 1024)
    off = memory_per_gpu(THIRTEEN, train, resolve_config("zero3_offload", train, 4), 4, 1024)
    assert off["on the host"] == pytest.approx(13.0159e9 * (12 + 4) / 4, rel=1e-4)  # states, and gradients in fp32
    assert off["on the host"] == on_gpu["optimizer"] + on_gpu["gradients"] + on_gpu["fp32 accumulation"]
    assert total_bytes(off) < total_bytes(on_gpu) - 50e9


@pytest.mark.parametrize("name", ["magicoder_7b", "magicoder_7b_8gpu", "magicoder_13b", "evol_7b", "medinstruct_7b", "medinstruct_13b"])
def test_the_papers_recipes_fit_their_gpus(name):
    recipe = load_recipe(name)
    ranks = recipe.hardware.ranks
    config = resolve_config(recipe.deepspeed.config, recipe.train, ranks)
    needed = memory_per_gpu(SHAPES[recipe.model.name_or_path], recipe.train, config, ranks, recipe.data.max_length)
    assert total_bytes(needed) < recipe.hardware.gpu_memory_gb * 1e9
    assert ranks == (8 if name.endswith("8gpu") else 4)


def test_what_does_not_fit():
    """Stage 2 at 13B on four GPUs: 72 GB of states alone, tight, and over 80 GB with everything else."""
    train = train_section(precision="bf16")
    assert total_bytes(memory_per_gpu(THIRTEEN, train, resolve_config("zero2", train, 4), 4, 1216)) > 80e9
    long = memory_per_gpu(SEVEN, train_section(micro_batch_size=32), resolve_config("zero2", train_section(micro_batch_size=32), 4), 4, 4096)
    assert 32 * 4096 * 32000 * 20 > 80e9 and long["loss"] < 3e9  # what whole logits would take, and a chunk of them does
    plain = train_section(gradient_checkpointing=False)
    once, every = (memory_per_gpu(SEVEN, t, resolve_config("zero2", t, 4), 4, 1024)["activations"] for t in (train, plain))
    assert every > 10 * once


def test_magicoders_steps():
    rows = DATASET_ROWS["ise-uiuc/Magicoder-OSS-Instruct-75K"]
    assert steps_text(rows, train_section()) == "147 steps an epoch (146 full, one of 445), 294 in all"
    assert steps_text(1024, train_section()) == "2 steps an epoch, 4 in all"


def test_loads_by_hand():
    """Two clusters of two samples, two ranks, one sample a micro-batch: each rank runs its own cluster's two samples."""
    plan = hand_plan([0, 0, 1, 1], num_tokens=[3, 4, 10, 20])

    def loads(world, attention=0.0, num_steps=None, max_length=32, **train):
        recipe = load_recipe("tiny", [f"data.max_length={max_length}"])
        recipe = recipe.model_copy(update={"train": train_section(epochs=1, global_batch_size=4, **train)})
        return loads_of_steps(plan, recipe, world, attention, num_steps).tolist()

    assert loads(2, micro_batch_size=1) == [[7, 30]]
    assert loads(2, micro_batch_size=2) == [[8, 40]]  # 3 is padded to 4, 10 to 20
    assert loads(2, attention=0.1, micro_batch_size=1) == [[7 + 0.1 * 25, 30 + 0.1 * 500]]
    assert loads(1, num_steps=2, micro_batch_size=1) == [[37]]
    assert loads(2, micro_batch_size=1, packing=True) == [[7, 30]]  # packs of 32
    assert loads(2, micro_batch_size=1, packing=True, allocation="tokens") == [[20, 17]]


def test_full_data_is_dealt_as_well_as_it_can_be():
    """The selection's slowest rank has cluster 1, 30 tokens; without clusters 20 + 3 and 10 + 4 are the most even pairs."""
    plan = hand_plan([0, 0, 1, 1], num_tokens=[3, 4, 10, 20])
    recipe = load_recipe("tiny", ["data.max_length=32"])
    train = train_section(epochs=1, global_batch_size=4, micro_batch_size=1, allocation="cluster")
    loads = loads_of_arms(plan, recipe.model_copy(update={"train": train}), 2, 0.0)
    assert {name: load.tolist() for name, load in loads.items()} == {"full": [23], "random": [23], "CluSTER": [30]}


def test_the_arms_have_the_same_budget():
    kept = np.array([True, False, True, False, False, True])
    plan = hand_plan([0, 0, 1, 1, -1, 1], kept=kept, weights=kept * 2.0)
    arms = arms_of(plan, 0)
    assert arms["full"].kept.sum() == 5 and not arms["full"].kept[4]  # a zero proxy is in no arm
    assert arms["random"].kept.sum() == arms["CluSTER"].kept.sum() == 3 and not arms["random"].kept[4]
    assert set(arms["random"].weight) == {0.0, 1.0} and arms["CluSTER"] is plan
