"""Adapters: what they start as, what they cost, and what is refused."""

import pytest
import torch

from cluster_ds.ds_config import resolve_config
from cluster_ds.estimate import memory_per_gpu
from cluster_ds.lora import base_name, base_of, updates_of, with_adapters
from cluster_ds.recipe import LoraSection, ModelSection
from cluster_ds.recipe_file import load_recipe
from cluster_ds.shapes import SHAPES, ModelShape

from .conftest import tiny_llama
from .test_estimate import train_section

IDS = torch.arange(3, 20)[None]


def test_the_adapted_model_starts_as_the_base_and_its_adapters_do_not_depend_on_what_was_drawn_before():
    expected = tiny_llama()(input_ids=IDS).logits
    found = []
    for drawn in (0, 5):
        model = tiny_llama()
        torch.rand(drawn)
        adapted = with_adapters(model, LoraSection(rank=4), seed=3)
        assert torch.equal(adapted(input_ids=IDS).logits, expected)
        found.append({name: p.clone() for name, p in adapted.named_parameters() if p.requires_grad})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_names_and_numbers(targets):
    adapted = with_adapters(tiny_llama(), LoraSection(rank=4, target_modules=targets), seed=0)
    base = [base_name(adapted, name) for name, p in adapted.named_parameters() if not p.requires_grad]
    assert base == [name for name, _ in tiny_llama().named_parameters()]
    assert all(base_name(adapted, name) is None for name, p in adapted.named_parameters() if p.requires_grad)
    assert set(updates_of(adapted)) <= set(base) and len(updates_of(adapted)) == 2 * (7 if targets == "all-linear" else 2)
    number = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert ModelShape(2, 32, 48, 4, 2, 64).adapter_parameters(LoraSection(rank=4, target_modules=targets)) == number
    assert base_of(adapted).config is adapted.config


@pytest.mark.parametrize(
    ("target", "message"),
    [("q_prj", "no linear layer of LlamaForCausalLM is named q_prj; there are down_proj"), ("lm_head", "lm_head is the output")],
)
def test_targets_that_do_not_fit(target, message):
    with pytest.raises(ValueError, match=message):
        with_adapters(tiny_llama(), LoraSection(target_modules=[target]), seed=0)


def test_memory_of_7b_with_adapters():
    """40 million adapters: gradients and AdamW's states of them alone; 13.5 GB of frozen bf16 weights stay."""
    shape, train = SHAPES["meta-llama/Llama-2-7b-hf"], train_section(precision="bf16")
    section = ModelSection(name_or_path="x", lora=LoraSection(rank=16))
    needed = memory_per_gpu(shape, train, resolve_config("zero2", train, 1), 1, 1024, section)
    adapters = shape.adapter_parameters(section.lora)
    assert adapters == 39_976_960  # 32 layers x 16 x (4 x 8192 + 3 x 15104)
    assert needed["parameters"] == 2 * (6_738_415_616 + adapters)
    assert needed["gradients"] == 2 * adapters and needed["optimizer"] == 12 * adapters


def test_a_section_that_is_off_is_switched_on_by_one_key(tmp_path):
    recipe = load_recipe("tiny", ["model.lora=null", "model.lora.rank=3"])
    assert recipe.model.lora == LoraSection(rank=3)
    with pytest.raises(ValueError, match=r"unknown key model\.lora\.rnk; did you mean model\.lora\.rank"):
        load_recipe("tiny", ["model.lora.rnk=3"])
