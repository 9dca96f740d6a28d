"""Stage 12b: a checkpoint of another number of ranks, through DeepSpeed's universal checkpoint. ZeRO stages 1 to 3, AdamW.

Facts behind the repairs, checked on DeepSpeed 0.19.8: a universal load leaves buffers and frozen weights as the model was
built, and step counters on the host, where a fused AdamW on a GPU cannot use them; at stage 3 it gives every parameter group
the settings of the first, and one step counter to all of them, which AdamW then counts on several times a step; ranks
without a parameter in a group end in an IndexError at stages 1 and 2.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from .distributed import Ranks
from .engine import ClusterEngine
from .files import is_disk_full, require_space

LEFTOVER = ".universal-"  # how a folder begins that a killed conversion leaves


def load_other_world_size(
    engine: ClusterEngine, checkpoint: Path, saved: int, num_bytes: int, ranks: Ranks
) -> None:  # collective
    """Restore weights, optimizer and schedule from a checkpoint that `saved` ranks wrote.

    Args:
        engine: freshly built; frozen weights are those it was built with.
        checkpoint: DeepSpeed's folder of the step.
        saved: ranks that wrote it.
        num_bytes: about what a checkpoint takes; converting writes it twice, until it is loaded.
        ranks: all call this.
    Raises:
        ValueError: where DeepSpeed cannot convert or load it, naming both numbers and the way on.
    """
    inner = engine.engine
    numbers = f"{checkpoint} was made by {saved} ranks, this run has {ranks.world_size}"
    way_on = f"{numbers}: start {saved} ranks, or another --output_dir"
    if not isinstance(inner.basic_optimizer, torch.optim.AdamW):
        raise ValueError(f"only AdamW's states can be divided anew; {way_on}")
    if inner.zero_round_robin_gradients():
        raise ValueError(f"zero_optimization.round_robin_gradients gives wrong weights on other ranks; {way_on}")
    if any(ranks.gather(_has_empty_group(inner))):
        raise ValueError(f"a rank would have no parameter of a group, which DeepSpeed cannot load; {way_on}")
    target = checkpoint.parent / f"{LEFTOVER}{checkpoint.name}" / checkpoint.name  # DeepSpeed writes into its parent as well

    def convert() -> None:
        shutil.rmtree(target.parent, ignore_errors=True)
        require_space(checkpoint.parent, 2 * num_bytes, f"{checkpoint.name} for another number of ranks")
        try:
            _convert(checkpoint, target)
        except (RuntimeError, AssertionError, KeyError, ValueError, OSError) as error:
            if is_disk_full(error):
                raise
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"DeepSpeed cannot convert this checkpoint ({what}); {way_on}") from error

    try:
        ranks.on_main(convert)
        _load(inner, target)  # collective
        ranks.gather(True)  # every rank has read its part
    finally:
        if ranks.is_main:
            shutil.rmtree(target.parent, ignore_errors=True)


def _convert(checkpoint: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # a line a parameter
        ds_to_universal.main(
            Namespace(
                input_folder=str(checkpoint), output_folder=str(target), num_extract_workers=1, num_merge_workers=1,
                keep_temp_folder=False, strict=True, inject_missing_state=True,
            )
        )  # fmt: skip


def _load(inner: Any, target: Path) -> None:  # collective
    inner._config.load_universal_checkpoint = True
    try:
        loaded, _ = inner.load_checkpoint(str(target.parent), tag=target.name)  # collective
    finally:
        inner._config.load_universal_checkpoint = False
    if loaded is None:
        raise ValueError(f"DeepSpeed could not load {target}")
    if inner.zero_optimization_stage() == 3:
        saved = torch.load(target / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=False)
        groups = saved["optimizer_state_dict"]["param_groups"]
        for group, was in zip(inner.basic_optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in was.items() if key != "params"})
    fused = any(group.get("fused") for group in inner.basic_optimizer.param_groups)
    for parameter, state in inner.basic_optimizer.state.items():
        step = torch.as_tensor(state["step"], dtype=torch.float32).clone()
        state["step"] = step.to(parameter.device) if fused else step
    _restore_fixed(inner.module, next(target.glob("*mp_rank_00_model_states.pt")))


@torch.no_grad()
def _restore_fixed(module: torch.nn.Module, file: Path) -> None:
    """Buffers, and frozen weights that are whole on each rank."""
    saved = torch.load(file, map_location="cpu", weights_only=False, mmap=True)["module"]
    fixed = dict(module.named_buffers()) | {
        name: p for name, p in module.named_parameters() if not p.requires_grad and not hasattr(p, "ds_id")
    }
    for name, tensor in fixed.items():
        if name in saved:
            tensor.copy_(saved[name])


def _has_empty_group(inner: Any) -> bool:
    optimizer = inner.optimizer
    groups = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "bf16_groups", [])
    return any(all(getattr(p, "_hp_mapping", None) is None for p in group) for group in groups)
