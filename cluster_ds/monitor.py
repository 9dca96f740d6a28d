"""Stage 13a: where a run's numbers go: its log, and TensorBoard, W&B or CSV files through DeepSpeed's monitor."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .distributed import on_gpu
from .engine import ClusterEngine
from .lora import base_name
from .prepare import Prepared
from .recipe import Recipe
from .run_log import RunLog
from .shapes import shape_of
from .throughput import peak_flops, step_flops

_SECTIONS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv": "csv_monitor"}  # ours -> DeepSpeed's
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


def require_monitors(recipe: Recipe) -> None:
    """Refuse monitors whose packages are not installed.

    Raises:
        ValueError: with the command that installs them.
    """
    missing = [name for name in recipe.train.log_to if name in _PACKAGES and find_spec(_PACKAGES[name]) is None]
    if missing:
        packages = " ".join(_PACKAGES[name] for name in missing)
        raise ValueError(f"train.log_to names {', '.join(missing)}: pip install {packages}, or take it out")


def monitor_config(recipe: Recipe, output_dir: Path, step: int, config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's sections for `train.log_to`; each start of a run writes a folder of its own, named by its first step.

    Raises:
        ValueError: if the ZeRO config has one of them as well.
    """
    name = recipe.name if step == 0 else f"{recipe.name}-from-{step}"
    sections: dict[str, Any] = {}
    for kind in recipe.train.log_to:
        key = _SECTIONS[kind]
        if key in config:
            raise ValueError(f"{recipe.deepspeed.config} has {key}, and train.log_to names {kind} as well: keep one of them")
        sections[key] = {"enabled": True}
        if kind == "wandb":
            sections[key] |= {"project": "cluster-ds", "group": name}
        else:
            sections[key] |= {"output_path": f"{output_dir / kind}", "job_name": name}
    return sections


def open_log(recipe: Recipe, prepared: Prepared, engine: ClusterEngine, output_dir: Path, first: int) -> RunLog:
    """The log of a run that goes on behind step `first`; on rank 0."""
    shape = shape_of(recipe.model.name_or_path, prepared.model_folder)
    module = engine.engine.module
    adapters = sum(
        getattr(p, "ds_numel", p.numel()) for name, p in module.named_parameters() if base_name(module, name) is None
    )
    monitor = engine.engine.monitor
    in_use, monitor.enabled = monitor.enabled, False  # else DeepSpeed writes the learning rate over an axis of its own
    computes_in_bf16 = on_gpu() and recipe.train.precision != "fp32"
    return RunLog(
        output_dir, first, engine.schedule, world_size=engine.dp_world_size,
        flops=None if shape is None else lambda lengths, n: step_flops(shape, lengths, n, adapters or None),
        peak=peak_flops(torch.cuda.get_device_name()) if computes_in_bf16 else None, monitor=monitor if in_use else None,
    )
