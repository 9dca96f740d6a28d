"""Stage 12c: the trained model as an ordinary Hugging Face folder, adapters merged, checked by loading it again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from .checkpoint import num_elements
from .distributed import Ranks
from .engine import ClusterEngine
from .files import commit_folder, read_json, require_space, write_json
from .lora import Update, base_name, base_of, is_adapted, updates_of

ADAPTER = "adapter"  # folder in an exported model
_SHARD_SIZE = "5GB"


def export_bytes(engine: ClusterEngine, dtype: torch.dtype) -> int:
    """What the exported weights take."""
    return sum(num_elements(p) * dtype.itemsize for p in base_of(engine.engine.module).parameters())


def export_model(
    engine: ClusterEngine, tokenizer: Any, folder: Path, dtype: torch.dtype, manifest: dict[str, Any], ranks: Ranks
) -> None:  # collective
    """Write the trained model as an ordinary Hugging Face folder and check that it loads with the same weights.

    Adapters are merged into it, and lie in its folder `adapter` as peft reads them.

    Args:
        engine: all ranks take part, at ZeRO stage 3 the weights are gathered.
        tokenizer: saved beside the weights.
        folder: appears only when whole.
        dtype: of the weights on disk.
        manifest: says what made it.
        ranks: all call this.
    Raises:
        ValueError: if a weight is empty or not finite, or the reloaded model differs.
    """
    ranks.on_main(lambda: require_space(folder.parent, export_bytes(engine, dtype), "the exported model"))
    weights = _gather_weights(engine, dtype, ranks.is_main)
    adapter = _gather_adapter(engine, ranks.is_main)

    def write() -> None:
        base = base_of(engine.engine.module)
        model = base
        if is_adapted(engine.engine.module):  # whose layers are no longer those of its class
            with torch.device("meta"):
                model = type(base)(base.config)
            model.generation_config = base.generation_config
        for name, value in weights.items():
            if value.numel() == 0 or not torch.isfinite(value).all():
                raise ValueError(f"export: {name} is {'empty' if value.numel() == 0 else 'not finite'}: training diverged?")
        with commit_folder(folder, manifest, replace=True) as part:
            model.save_pretrained(part, state_dict=weights, max_shard_size=_SHARD_SIZE)
            config = read_json(part / "config.json")
            write_json(part / "config.json", {**config, "dtype": str(dtype).removeprefix("torch.")})
            tokenizer.save_pretrained(part)
            if adapter:
                engine.engine.module.save_pretrained(part / ADAPTER, state_dict=adapter, save_embedding_layers=False)
            digests = {name: _digest(value) for name, value in weights.items()}
            weights.clear()  # the host holds one copy at a time
            _verify_export(type(model), part, digests)

    ranks.on_main(write)


def _gather_weights(engine: ClusterEngine, dtype: torch.dtype, keep: bool) -> dict[str, torch.Tensor]:  # collective
    """All weights on the CPU of rank 0, adapters merged; weights that the model shares stay shared."""
    import deepspeed

    module, out = engine.engine.module, {}
    copies: dict[int, torch.Tensor | None] = {}
    updates = updates_of(module)
    for own_name, parameter in module.named_parameters(remove_duplicate=False):
        name = base_name(module, own_name)
        if name is None:
            continue
        update = updates.get(name)
        if id(parameter) not in copies:
            needed = [parameter] if update is None else [parameter, update.a, update.b]
            with deepspeed.zero.GatheredParameters(needed, enabled=hasattr(parameter, "ds_id")):  # collective
                copies[id(parameter)] = _merged(parameter, update).to("cpu", dtype, copy=True) if keep else None
        out[name] = copies[id(parameter)]
    parameters = set(out)
    for own_name, value in module.state_dict().items():  # persistent buffers
        name = base_name(module, own_name)
        if name is not None and name not in parameters:
            out[name] = value.detach().cpu()
    return {name: value for name, value in out.items() if value is not None}


def _gather_adapter(engine: ClusterEngine, keep: bool) -> dict[str, torch.Tensor]:  # collective
    """The adapters' own weights on the CPU of rank 0; nothing of a model without them."""
    import deepspeed

    module, out = engine.engine.module, {}
    for name, parameter in module.named_parameters():
        if base_name(module, name) is None:
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):  # collective
                if keep:
                    out[name] = parameter.detach().to("cpu", copy=True)
    return out


def _merged(weight: torch.nn.Parameter, update: Update | None) -> torch.Tensor:
    """The weight, with its adapter's update added in float32."""
    if update is None:
        return weight.detach()
    return weight.detach().float() + update.scaling * (update.b.detach().float() @ update.a.detach().float())


def _digest(value: torch.Tensor) -> bytes:
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.data, digest_size=16).digest()


def _verify_export(kind: Any, folder: Path, digests: dict[str, bytes]) -> None:
    model, report = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    problems = {k: v for k, v in report.items() if k in ("missing_keys", "unexpected_keys", "mismatched_keys") and v}
    if problems:
        raise ValueError(f"export {folder} does not load cleanly: {problems}")
    reloaded = model.state_dict()
    different = [name for name, digest in digests.items() if _digest(reloaded[name]) != digest]
    if different:
        raise ValueError(f"export {folder}: {len(different)} weights differ after reloading, the first is {different[0]}")
