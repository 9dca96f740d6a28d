"""What a step computes in floating point operations, and what share of the device's peak that is (MFU).

Model FLOPs: the forward and backward pass of the trained tokens alone. Padding, fillers and what gradient checkpointing
computes a second time count for nothing. Shapes: L layers, H hidden, V vocabulary, l tokens of a sample.
"""

from __future__ import annotations

import re

import numpy as np

from .shapes import ModelShape

# Dense bf16 peaks by the makers' data sheets, FLOP/s; the first name that the device's contains.
PEAKS = {
    "B200": 2.25e15, "H200": 989e12, "GH200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A40": 150e12,
    "A10G": 70e12, "A10": 125e12, "RTX 4090": 165e12, "RTX A6000": 155e12,
}


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a GPU in dense bf16, None for one that is not listed."""
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device_name)), None)


def step_flops(shape: ModelShape, lengths: np.ndarray, num_supervised: int, adapters: int | None = None) -> float:
    """FLOPs of a forward and backward pass over samples.

    A matrix of P weights costs 2 P a token forward, 2 P for its input's gradient and 2 P for its own; causal attention
    2 H l^2 a layer forward and twice that backward. Logits are made for supervised tokens alone.

    Args:
        shape: of the model.
        lengths: [n], tokens of each sample.
        num_supervised: tokens that are predicted, in all.
        adapters: weights of low-rank adapters; the model's own then need no gradient.
    """
    lengths = lengths.astype(float)
    tokens = lengths.sum()
    layers, head = shape.num_layers * shape.layer_parameters, shape.vocab_size * shape.hidden_size
    passes = 6 if adapters is None else 4
    matrices = passes * (layers * tokens + head * num_supervised) + 6 * (adapters or 0) * tokens
    return float(matrices + 6 * shape.num_layers * shape.hidden_size * (lengths**2).sum())
