"""Model FLOPs against torch's own counter, and the peaks of devices."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cluster_ds.lora import with_adapters
from cluster_ds.recipe import LoraSection
from cluster_ds.shapes import ModelShape
from cluster_ds.throughput import peak_flops, step_flops

from .conftest import tiny_llama

SHAPE = ModelShape(2, 32, 48, 4, 2, 64)


@pytest.mark.parametrize("lora", [False, True])
def test_flops_are_those_that_torch_counts(lora):
    """Two samples of 20 tokens, all of them predicted. torch counts all of the square that causal attention halves."""
    model, adapters = tiny_llama(attn_implementation="eager"), None
    if lora:
        model = with_adapters(model, LoraSection(rank=4), seed=0)
        adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    embedded = model.get_input_embeddings()(torch.randint(3, 60, (2, 20))).detach().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    ours = step_flops(SHAPE, np.array([20, 20]), 40, adapters)
    upper_half = 6 * 2 * 32 * 2 * 20**2
    norms = 2 * 2 * 32  # their weights count as matrices in the shape's layers; torch sees no product there
    tolerance = 6 * 40 * norms + 1e4  # and the rotary angles
    assert ours + upper_half == pytest.approx(counter.get_total_flops(), abs=tolerance)
    assert tolerance < 0.02 * ours


def test_peaks():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA L40S") == 362e12 and peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert [peak_flops(f"NVIDIA {name}") for name in ("RTX A4000", "RTX A1000 Laptop GPU", "GB200")] == [None] * 3
    assert peak_flops("NVIDIA A40") == 150e12 and peak_flops("NVIDIA H200") == 989e12 and peak_flops("Some CPU") is None
