"""Stage 12: crash-safe checkpoints over DeepSpeed's.

A checkpoint is `step-00000050/`: DeepSpeed's files, each rank's random state, and a manifest that rank 0 writes last, when
every rank has finished. A folder without a manifest was never finished; one whose files differ from it is damaged.
"""

from __future__ import annotations

import gc
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .distributed import Ranks, on_gpu
from .engine import ClusterEngine
from .files import MANIFEST, fsync, is_disk_full, read_json, require_space, write_json
from .lora import is_adapted
from .universal import LEFTOVER, load_other_world_size

BEST = "best.json"  # beside the checkpoints: which had the least held-out loss


@dataclass(frozen=True)
class Found:
    """What `find_checkpoint` saw: the newest whole checkpoint's step (None without one) and what was passed over."""

    step: int | None
    notes: list[str]


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay.

    Attributes:
        newest: how many of the last ones.
        milestone_every: those of multiples of this step as well.
        best: and this step's, to which best.json points.
    """

    newest: int
    milestone_every: int | None = None
    best: int | None = None

    def steps(self, whole: list[int]) -> set[int]:
        """Of the whole checkpoints' steps those that stay."""
        milestones = {step for step in whole if self.milestone_every and step % self.milestone_every == 0}
        return {*sorted(whole)[-self.newest :], *milestones, *(step for step in whole if step == self.best)}


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.rpartition("-")[2])


def tag_of(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def save_checkpoint(
    engine: ClusterEngine, folder: Path, step: int, state: dict[str, Any], ranks: Ranks, keep: Keep
) -> str | None:  # collective
    """Write one checkpoint at a step boundary, then prune older ones.

    Args:
        engine: to save.
        folder: of all checkpoints.
        step: optimizer steps done.
        state: goes into the manifest.
        ranks: all call this.
        keep: which whole checkpoints stay, this one among them; unfinished and damaged ones go.
    Returns:
        None, or why the disk could not hold it; nothing is left of it then, and no older one was touched.
    """
    target = folder / tag_of(step)

    def make_room() -> str | None:
        shutil.rmtree(target, ignore_errors=True)  # an unfinished one of the same step
        try:
            require_space(folder, checkpoint_bytes(engine), f"the checkpoint of step {step}")
        except ValueError as error:
            return str(error)
        return None

    problem = ranks.on_main(make_room)
    if problem is not None:
        return problem
    full: list[str] = []
    with _disk_full_noted(engine.engine, full):
        engine.engine.save_checkpoint(  # collective
            str(folder), tag=tag_of(step), client_state={}, save_latest=False,
            exclude_frozen_parameters=is_adapted(engine.engine.module),
        )
    if not full:
        _unless_disk_full(full, torch.save, _random_state(), target / f"random_rank_{ranks.rank}.pt")
    problems = [text for part in ranks.gather(full) for text in part]  # every rank's files are written

    def commit() -> str | None:
        if not problems:
            _unless_disk_full(problems, _commit, target, {**state, "step": step, "world_size": ranks.world_size})
        if problems:
            shutil.rmtree(target, ignore_errors=True)
            return problems[0]
        _prune(folder, target, keep)
        return None

    return ranks.on_main(commit)


@contextmanager
def _disk_full_noted(inner: Any, full: list[str]) -> Iterator[None]:
    """Note that the disk is full instead of leaving DeepSpeed's save, in which the other ranks would wait for ever."""
    writers = [(inner.checkpoint_engine, "save"), (inner, "_copy_recovery_script")]  # all that writes, of 0.19.8
    originals = [getattr(owner, name) for owner, name in writers]
    for (owner, name), write in zip(writers, originals, strict=True):
        noted = partial(_unless_disk_full, full, write)
        object.__setattr__(owner, name, noted)
    try:
        yield
    finally:
        for owner, name in writers:
            object.__delattr__(owner, name)


def _unless_disk_full(full: list[str], work: Callable[..., object], *what: Any, **where: Any) -> None:
    try:
        work(*what, **where)
    except (OSError, RuntimeError) as error:
        if not is_disk_full(error):
            raise
        full.append(str(error))


def _commit(target: Path, manifest: dict[str, Any]) -> None:
    files = sorted(p for p in target.rglob("*") if p.is_file())
    for path in files:
        fsync(path)
    sizes = {str(p.relative_to(target)): p.stat().st_size for p in files}
    write_json(target / MANIFEST, {**manifest, "files": sizes})
    fsync(target.parent)


def _prune(folder: Path, newest: Path, keep: Keep) -> None:
    whole = [p for p in folder.glob("step-*") if p == newest or _problem(p) is None]
    kept = {tag_of(number) for number in keep.steps([step_of(p) for p in whole])}
    if keep.best is not None:
        write_json(folder / BEST, {"checkpoint": tag_of(keep.best), "step": keep.best})
    for old in (*folder.glob("step-*"), *folder.glob(f"{LEFTOVER}*")):
        if old != newest and old.name not in kept:
            shutil.rmtree(old)


def checkpoint_bytes(engine: ClusterEngine) -> int:
    """About what one checkpoint takes: weights, fp32 masters (ZeRO has them of fp32 weights too), AdamW's two moments.

    Of adapted models the adapters alone are saved.
    """
    optimizer = engine.engine.basic_optimizer
    master = 0 if optimizer is engine.engine.optimizer else 4  # a bare optimizer works on the weights themselves
    total = 0
    for parameter in engine.engine.module.parameters():
        size = parameter.element_size()
        moments = 2 * (master or size) if isinstance(optimizer, torch.optim.AdamW) else 0
        if parameter.requires_grad:
            total += num_elements(parameter) * (size + master + moments)
        elif not is_adapted(engine.engine.module):
            total += num_elements(parameter) * size
    return total


def num_elements(parameter: torch.nn.Parameter) -> int:
    """Of a parameter, whole."""
    return getattr(parameter, "ds_numel", parameter.numel())  # at ZeRO stage 3 a parameter itself is empty


def is_whole(folder: Path, step: int) -> bool:
    """Whether the step's checkpoint is there with all its files."""
    return _problem(folder / tag_of(step)) is None


def find_sound_checkpoint(folder: Path, wanted: str | None, ranks: Ranks) -> Found:  # collective
    """As `find_checkpoint`, after the ranks have read what was found and compared its files with their checksums."""
    unsound: dict[str, str] = {}
    while True:
        found = ranks.on_main(lambda: find_checkpoint(folder, wanted, unsound))
        if found.step is None:
            return found
        files = sorted((folder / tag_of(found.step)).glob("*.pt"))
        mine = [problem for file in files[ranks.rank :: ranks.world_size] if (problem := _unsound(file)) is not None]
        problems = [problem for part in ranks.gather(mine) for problem in part]
        if not problems:
            return found
        unsound[tag_of(found.step)] = problems[0]


def _unsound(file: Path) -> str | None:
    """What is wrong with a file of torch's, which is a zip archive with a checksum of each tensor."""
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except Exception as error:  # a flipped bit may also make it look encrypted, or its names no text
        return f"{file.name}: {error}"
    return None if bad is None else f"{file.name}: {bad} does not match its checksum"


def find_checkpoint(folder: Path, wanted: str | None = None, unsound: dict[str, str] | None = None) -> Found:
    """The newest whole checkpoint, or the one that is wanted.

    Args:
        folder: of all checkpoints.
        wanted: a checkpoint's path, or its name in `folder`.
        unsound: names of checkpoints that are known to be damaged, with what is wrong.

    Raises:
        ValueError: if there are finished checkpoints but all of them are damaged, or the one that is wanted is not whole;
            nothing is deleted or overwritten.
    """
    if wanted is not None:
        path = folder / wanted if (folder / wanted).exists() else Path(wanted).resolve()
        if path.parent != folder or not path.is_dir():
            there = ", ".join(p.name for p in sorted(folder.glob("step-*"))) or "none"
            raise ValueError(f"--resume {wanted}: no such checkpoint in {folder}, which has {there}")
        problem = _problem(path, unsound)
        if problem is not None:
            raise ValueError(f"--resume {wanted}: {path} is not whole: {problem}")
        return Found(read_json(path / MANIFEST)["step"], [])
    notes: list[str] = []
    damaged: list[str] = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        problem = _problem(path, unsound)
        if problem is None:
            return Found(read_json(path / MANIFEST)["step"], notes)
        notes.append(f"checkpoint {path.name} passed over: {problem}")
        if (path / MANIFEST).exists():
            damaged.append(f"{path}: {problem}")
    if damaged:
        raise ValueError(
            "no whole checkpoint to resume from; nothing was changed:\n  "
            + "\n  ".join(damaged)
            + f"\nrestore the files, or start again with another --output_dir (or after deleting {folder})"
        )
    return Found(None, notes)


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints behind `step`, from which another future begins, so that nothing finds them by itself."""
    renamed = []
    for path in sorted(folder.glob("step-*")):
        if path.name > tag_of(step):
            target = path.with_name(f"set-aside-{path.name}")
            if target.exists():
                shutil.rmtree(target)
            renamed.append(path.rename(target))
    return renamed


def load_checkpoint(engine: ClusterEngine, folder: Path, step: int, ranks: Ranks) -> None:  # collective
    """Restore weights, optimizer, schedule and this rank's random state.

    Raises:
        ValueError: if the checkpoint was made by another number of ranks and DeepSpeed cannot divide it anew.
    """
    target = folder / tag_of(step)
    saved = read_json(target / MANIFEST)["world_size"]
    if saved != ranks.world_size and engine.engine.zero_optimization_stage() > 0:
        load_other_world_size(engine, target, saved, checkpoint_bytes(engine), ranks)  # collective
    else:
        strict = not is_adapted(engine.engine.module)
        loaded, _ = engine.engine.load_checkpoint(str(folder), tag=tag_of(step), load_module_strict=strict)  # collective
        if loaded is None:
            raise ValueError(f"DeepSpeed could not load {target}")
        if engine.engine.optimizer is engine.engine.basic_optimizer:
            _restore_uncast(engine.engine.basic_optimizer, Path(loaded))
    if saved == ranks.world_size:
        _set_random_state(torch.load(target / f"random_rank_{ranks.rank}.pt", weights_only=False))
    else:  # dropout cannot go on as it would have, but every rank draws its own
        torch.manual_seed(step * ranks.world_size + ranks.rank)


def release(engine: ClusterEngine) -> None:
    """Give the memory of weights, gradients and optimizer back; DeepSpeed's own references outlive the engine."""
    inner = engine.engine
    inner.optimizer.zero_grad()
    groups = [p for group in inner.basic_optimizer.param_groups for p in group["params"]]
    inner.basic_optimizer.state.clear()
    inner.destroy()
    for parameter in (*inner.module.parameters(), *groups):
        for tensor in (parameter, getattr(parameter, "ds_tensor", None)):
            if tensor is not None:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        parameter.grad = None
        vars(parameter).clear()  # views of the fp32 masters among what DeepSpeed hangs on parameters
    if inner.optimizer is not inner.basic_optimizer:  # ZeRO's flat buffers: its hooks keep the wrapper itself alive
        vars(inner.optimizer).clear()
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


def _restore_uncast(optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Torch casts a loaded optimizer state to its parameter's dtype; bf16 weights would lose fp32 statistics."""
    saved = torch.load(file, map_location="cpu", weights_only=False)["optimizer"]
    names = [name for group in saved["param_groups"] for name in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in saved["state"].get(name, {}).items():
            if torch.is_tensor(value):
                optimizer.state[parameter][key] = value.to(optimizer.state[parameter][key].device)


def _problem(path: Path, unsound: dict[str, str] | None = None) -> str | None:
    if unsound and path.name in unsound:
        return unsound[path.name]
    if not (path / MANIFEST).is_file():
        return "its saving was interrupted"
    try:
        sizes = read_json(path / MANIFEST)["files"]
    except (ValueError, KeyError):
        return f"{MANIFEST} is not readable"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _random_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if on_gpu():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and on_gpu():
        torch.cuda.set_rng_state(state["cuda"])


