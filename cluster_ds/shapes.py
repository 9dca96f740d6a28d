"""Facts about models and data sets of the recipes, so that a run can be planned before anything has been downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .recipe import LoraSection

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}  # logits that the loss holds: what caches take, what keeps a GPU busy


@dataclass(frozen=True)
class ModelShape:
    """What memory depends on, of a Llama-like decoder: gated feed-forward, no biases, two norms a layer.

    Attributes:
        num_layers: L.
        hidden_size, intermediate_size: H, I.
        num_heads, num_kv_heads: of attention.
        vocab_size: V.
        tied: whether the output embeddings are the input's.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        h, i = self.hidden_size, self.intermediate_size
        kv = h * self.num_kv_heads // self.num_heads
        return 2 * h * h + 2 * h * kv + 3 * h * i + 2 * h

    def adapter_parameters(self, lora: LoraSection) -> int:
        """Of low-rank adapters on the section's linear layers."""
        h, i = self.hidden_size, self.intermediate_size
        kv = h * self.num_kv_heads // self.num_heads
        sides = {
            "q_proj": h + h, "k_proj": h + kv, "v_proj": h + kv, "o_proj": h + h, "gate_proj": h + i, "up_proj": h + i,
            "down_proj": h + i,
        }
        targets = sides if lora.target_modules == "all-linear" else lora.target_modules
        return self.num_layers * lora.rank * sum(sides.get(target.rpartition(".")[2], 0) for target in targets)

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return embeddings + self.num_layers * self.layer_parameters + self.hidden_size

    @property
    def factored_parameters(self) -> int:
        """Row and column statistics that Adafactor keeps instead of a second moment, and the vectors' own."""
        h, i, v = self.hidden_size, self.intermediate_size, self.vocab_size
        kv = h * self.num_kv_heads // self.num_heads
        layer = 2 * (h + h) + 2 * (h + kv) + 3 * (h + i) + 2 * h
        return self.num_layers * layer + (1 if self.tied else 2) * (v + h) + h


# Their config.json: 32,000 pieces, untied, full multi-head attention.
_7B = ModelShape(32, 4096, 11008, 32, 32, 32000)
_13B = ModelShape(40, 5120, 13824, 40, 40, 32000)
SHAPES = {
    "codellama/CodeLlama-7b-Python-hf": _7B, "codellama/CodeLlama-13b-Python-hf": _13B,
    "meta-llama/Llama-2-7b-hf": _7B, "meta-llama/Llama-2-13b-hf": _13B,
}
# Rows of the recipes' data sets, before any is excluded.
DATASET_ROWS = {
    "ise-uiuc/Magicoder-OSS-Instruct-75K": 75_197,
    "nickrosh/Evol-Instruct-Code-80k-v1": 78_264,
    "lavita/AlpaCare-MedInstruct-52k": 52_002,
}


def shape_of(name_or_path: str, folder: Path | None) -> ModelShape | None:
    """The shape of a model that is here, or of one that is known; None for others and for other architectures."""
    if folder is None:
        return SHAPES.get(name_or_path)
    from .models import text_config  # and with it transformers: known shapes need none

    config = text_config(folder)
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if not all(isinstance(getattr(config, name, None), int) for name in needed):
        return None
    heads = config.num_attention_heads
    return ModelShape(
        config.num_hidden_layers, config.hidden_size, config.intermediate_size, heads,
        getattr(config, "num_key_value_heads", None) or heads, config.vocab_size,
        bool(getattr(config, "tie_word_embeddings", False)),
    )


def quadratic_cost(folder: Path) -> float:
    """C of a sample's cost l + c l^2 of l tokens: causal attention's products beside the layers' matrices; 0 if unknown."""
    shape = shape_of(str(folder), folder)
    return 0.0 if shape is None else shape.hidden_size / shape.layer_parameters
