"""Stage 11c: low-rank adapters on a model's linear layers, by peft, and their way back into its weights.

Proxies come from the base model, which the adapted one equals before its first step. Shapes: R rank, I inputs and O outputs
of a layer.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from .recipe import LoraSection

_PREFIX, _BASE, _ADAPTER = "base_model.model.", ".base_layer.", "default"


@dataclass(frozen=True)
class Update:
    """What an adapter adds to a weight [O, I]: scaling x B A."""

    a: torch.nn.Parameter  # [R, I]
    b: torch.nn.Parameter  # [O, R]
    scaling: float


def with_adapters(model: PreTrainedModel, section: LoraSection, seed: int) -> torch.nn.Module:
    """The model with frozen weights and an adapter, which changes nothing yet, on each of the section's linear layers.

    Args:
        model: of any placement; under zero.Init the adapters join its shards when the engine is built.
        section: the recipe's.
        seed: of A; the same on every rank.
    Raises:
        ValueError: if a name fits no linear layer, or fits the output embeddings.
    """
    from peft import LoraConfig, get_peft_model

    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    if section.target_modules != "all-linear":
        endings = sorted({name.rpartition(".")[2] for name in linear})
        for target in section.target_modules:
            fits = [name for name in linear if name == target or name.endswith(f".{target}")]
            if not fits:
                raise ValueError(
                    f"model.lora.target_modules: no linear layer of {type(model).__name__} is named {target}; there are "
                    f"{', '.join(endings)}"
                )
            if any(model.get_submodule(name) is model.get_output_embeddings() for name in fits):
                raise ValueError(
                    f"model.lora.target_modules: {target} is the output embeddings, whose adapter the loss in training "
                    "would pass by: leave it out"
                )
    config = LoraConfig(
        task_type="CAUSAL_LM", r=section.rank, lora_alpha=section.alpha, lora_dropout=section.dropout,  # type: ignore[arg-type]
        target_modules=section.target_modules,
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():  # peft asks transformers by a name that is about to go
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, config, autocast_adapter_dtype=False)


def is_adapted(module: torch.nn.Module) -> bool:
    """Whether this is a model that peft has wrapped."""
    return hasattr(module, "peft_config")


def base_of(module: torch.nn.Module) -> PreTrainedModel:
    """The Hugging Face model, adapted or not."""
    return module.get_base_model() if is_adapted(module) else module  # type: ignore[operator,return-value]


def base_name(module: torch.nn.Module, name: str) -> str | None:
    """What a parameter or buffer is called in the model that was adapted; None for an adapter's own."""
    if not is_adapted(module):
        return name
    if ".lora_" in name:
        return None
    return name.removeprefix(_PREFIX).replace(_BASE, ".")


def updates_of(module: torch.nn.Module) -> dict[str, Update]:
    """What is to be added to which weight of the base model, by its name there.

    Raises:
        ValueError: for an adapter that is not a plain low-rank one.
    """
    found = {}
    for name, layer in module.named_modules() if is_adapted(module) else ():
        if not hasattr(layer, "lora_A") or not layer.lora_A:
            continue
        if set(layer.lora_A) != {_ADAPTER} or layer.fan_in_fan_out or any(layer.use_dora.values()):
            raise ValueError(f"{name}: only one plain LoRA adapter, named {_ADAPTER}, can be merged")
        found[f"{name.removeprefix(_PREFIX)}.weight"] = Update(
            layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight, float(layer.scaling[_ADAPTER])
        )
    return found
