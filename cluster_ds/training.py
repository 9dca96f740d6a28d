"""Stage 13: the loop: step, log, checkpoint, export; the same command continues where it was stopped."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .building import build_training, schedule_of
from .checkpoint import Keep, checkpoint_bytes, find_sound_checkpoint, load_checkpoint, release, save_checkpoint
from .diagnosis import GradientWatch
from .distributed import Ranks, ensure_process_group
from .ds_config import resolve_config
from .engine import ClusterEngine
from .estimate import batch_text
from .export import export_bytes, export_model
from .files import require_ours, require_space, write_text
from .loader import ClusterLoader
from .memory import is_out_of_memory, peak_memory
from .models import pad_token_id
from .monitor import monitor_config, open_log
from .prepare import Prepared
from .recipe import Recipe, TrainSection
from .resuming import finished_steps, identity_of, resume_step
from .run_log import RunLog
from .sample_losses import mean_losses
from .tokens import TokenTable
from .validation import HeldOut, Progress, read_progress
from .watch import LOADING, Stopped, Watch


class NotFiniteError(ValueError):
    """A step whose loss or gradient is not finite, on all ranks alike: both are of the whole global batch."""


@dataclass(frozen=True)
class TrainResult:
    """What `train` leaves.

    Attributes:
        model: folder of the exported model.
        num_steps: optimizer steps of the whole run.
        seconds: of this process's training, 0 when everything was there already.
        reused: whether the model was there already.
        stopped_early: whether the held-out loss ended it before its last step.
    """

    model: Path
    num_steps: int
    seconds: float
    reused: bool
    stopped_early: bool = False


def train(
    recipe: Recipe, prepared: Prepared, output_dir: Path, ranks: Ranks, resume: str | None = None,
    held_out: TokenTable | None = None,
) -> TrainResult:  # collective
    """Train on the plan, from the newest whole checkpoint of `output_dir` if there is one, or from `resume`.

    Args:
        recipe: says how.
        prepared: the plan and its samples.
        output_dir: the run's folder.
        ranks: all call this.
        resume: name or path of the checkpoint to go on from.
        held_out: what evaluate.every looks at.

    Raises:
        ValueError: if the folder holds a run of something else, naming what differs, or only damaged checkpoints.
    """
    config = resolve_config(recipe.deepspeed.config, recipe.train, ranks.world_size)
    total = ranks.on_main(lambda: schedule_of(recipe, prepared.plan).num_steps)
    identity = {**identity_of(recipe, prepared.plan, config), "num_steps": total}
    model_folder = output_dir / "model"
    exported = {**identity, "export_dtype": recipe.train.export_dtype}
    if recipe.evaluate.keep_best or recipe.evaluate.patience is not None:  # they decide what is exported
        exported["evaluate"] = recipe.evaluate.model_dump(include={"every", "keep_best", "patience"})
    finished = ranks.on_main(lambda: finished_steps(model_folder, exported))
    if finished is not None and resume is None:
        ranks.print(f"[train] reused the finished model {model_folder}")
        return TrainResult(model_folder, finished, 0.0, True, finished < total)
    ranks.on_main(lambda: require_ours(model_folder))
    found = find_sound_checkpoint(output_dir / "checkpoints", resume, ranks)
    step = ranks.on_main(lambda: resume_step(output_dir, identity, recipe, ranks, found, resume is not None))
    ranks.on_main(lambda: write_text(output_dir / "recipe.yaml", recipe.to_yaml()))
    monitors = ranks.on_main(lambda: monitor_config(recipe, output_dir, step, config)) if step < total else {}

    ensure_process_group(ranks)
    started = time.perf_counter()
    dtype = getattr(torch, recipe.train.export_dtype)
    checkpoints = output_dir / "checkpoints"
    with peak_memory("training", ranks), _explained(recipe):
        engine, loader = build_training(recipe, prepared, config | monitors, ranks)
        if step < total and recipe.train.full_disk == "stop":
            needed = checkpoint_bytes(engine) + export_bytes(engine, dtype)
            ranks.on_main(lambda: require_space(output_dir, needed, "one checkpoint and the exported model"))
        if step:
            load_checkpoint(engine, checkpoints, step, ranks)
            loader.load_state_dict({"step": step})
        data = None if held_out is None else held_out.key
        progress = ranks.on_main(lambda: read_progress(output_dir, step, recipe.evaluate.patience, data))
        watched = None
        if held_out is not None and recipe.evaluate.every is not None:
            room = min(recipe.selection.tokens_per_batch, recipe.tokens_per_micro_batch)  # beside gradients and states
            watched = HeldOut(held_out, room, pad_token_id(prepared.tokenizer), ranks)
        with ranks.watch.deferring(recipe.train.hang_timeout_s):
            step = _loop(recipe, prepared, engine, loader, output_dir, identity, ranks, watched, progress)
    best = (progress.best_kept or step) if recipe.evaluate.keep_best else step
    if best != step:
        with peak_memory("loading the best checkpoint", ranks):
            release(engine)  # DeepSpeed's stage 3 wants a new engine to load into
            engine, _ = build_training(recipe, prepared, config, ranks)
            load_checkpoint(engine, checkpoints, best, ranks)
        ranks.print(f"[train] exporting step {best}, whose held-out loss was the least, not step {step}")
    with peak_memory("export", ranks):
        exported |= {"steps_done": step, "step": best}
        export_model(engine, prepared.tokenizer, model_folder, dtype, exported, ranks)
    release(engine)  # the exported model is about to be loaded for evaluation
    ranks.print(f"[train] exported and reloaded {model_folder}")
    return TrainResult(model_folder, step, time.perf_counter() - started, False, step < total)


def _loop(
    recipe: Recipe, prepared: Prepared, engine: ClusterEngine, loader: ClusterLoader, output_dir: Path,
    identity: dict[str, Any], ranks: Ranks, held_out: HeldOut | None, progress: Progress,
) -> int:  # collective
    """Train from the loader's step on.

    Returns:
        steps done: all, or as many as the held-out loss allowed.
    Raises:
        Stopped: behind a checkpoint, if that was asked for.
    """
    train, evaluate = recipe.train, recipe.evaluate
    schedule, step, watch = engine.schedule, loader.step, ranks.watch
    if progress.is_exhausted:  # stopped behind its last evaluation, before the export
        return step
    log = open_log(recipe, prepared, engine, output_dir, step) if ranks.is_main else None
    gradients = GradientWatch(engine.engine.module, ranks.device) if train.diagnose_every else None
    bar = tqdm(total=schedule.num_steps, initial=step, desc="train", unit="step", disable=not ranks.is_main or None)
    started, waited, num_left_out, looking = time.perf_counter(), 0.0, 0, False
    for batch, wait_s in _timed(loader, watch):
        waited += wait_s
        lr = engine.lr
        where = f"step {step + 1}, micro-batch {batch['micro_step'] + 1}"
        if gradients is not None and batch["micro_step"] == 0 and (step + 1) % (train.diagnose_every or 1) == 0:
            looking = True
            gradients.begin()
        watch.at(f"{where}, forward")
        loss = engine(batch)
        watch.at(f"{where}, backward")
        engine.backward(loss)
        if gradients is not None and looking:
            gradients.next_micro_batch(is_empty=bool(batch["is_filler"].all()))
        watch.at(f"{where}, update")
        engine.stop_vote = watch.requested is not None
        if not engine.step():
            continue
        diagnosis = gradients.end() if gradients is not None and looking else None  # collective
        looking = False
        record = engine.last_record
        now = time.perf_counter()
        if log is not None:
            log.write(step, record, lr, engine.grad_norm, now - started, waited, diagnosis)
            bar.set_postfix(loss=f"{record.loss:.3f}", tok_s=f"{record.num_tokens / (now - started):.0f}", refresh=False)
        if math.isfinite(record.loss) and math.isfinite(engine.grad_norm or 0.0) and engine.step_applied:
            num_left_out = 0
        else:
            num_left_out += 1
            _judge_step(train, engine, step + 1, num_left_out, ranks)
        step += 1
        bar.update()
        last = step == schedule.num_steps
        if held_out is not None and (step % (evaluate.every or 1) == 0 or last):
            with watch.unhurried():
                _evaluate(held_out, engine, step, progress, log, output_dir)  # collective
        if step % train.checkpoint_every == 0 or last or record.num_stop_votes or progress.is_exhausted:
            if log is not None:
                log.sync()  # a checkpoint never knows of steps that the log does not
            state = {"identity": identity, "batches": batch_text(recipe, ranks.world_size)}
            best = progress.best_kept if evaluate.keep_best else None
            keep = Keep(train.keep_checkpoints, train.milestone_every, best)
            with watch.unhurried():
                problem = save_checkpoint(engine, output_dir / "checkpoints", step, state, ranks, keep)  # collective
            if problem is not None:
                progress.not_kept.add(step)
                _judge_full_disk(train, step, problem, bool(record.num_stop_votes), ranks)
        if progress.is_exhausted and not last:
            ranks.print(
                f"[train] stopped early behind step {step} of {schedule.num_steps}: the held-out loss had its least at step "
                f"{progress.best_step}, {evaluate.patience} evaluations ago (evaluate.patience)"
            )
            break
        if record.num_stop_votes:
            raise Stopped(step)
        started, waited = time.perf_counter(), 0.0
    bar.close()
    if log is not None:
        log.close()
    return step


def _judge_full_disk(train: TrainSection, step: int, problem: str, is_stopping: bool, ranks: Ranks) -> None:
    """A checkpoint that the disk could not hold ends the run, unless it may go on without.

    Raises:
        OSError: on rank 0; PeerError on the others.
    """
    text = f"the checkpoint of step {step} was not kept: {problem}"

    def refuse() -> None:
        raise OSError(errno.ENOSPC, text)

    if train.full_disk == "stop" or is_stopping:
        ranks.on_main(refuse)
    ranks.print(f"[train] {text}; the last whole one stays, and training goes on (train.full_disk)")


def _evaluate(
    held_out: HeldOut, engine: ClusterEngine, step: int, progress: Progress, log: RunLog | None, output_dir: Path
) -> None:  # collective
    started = time.perf_counter()
    found = held_out.losses(engine)
    losses = mean_losses(found, held_out.tokens.num_supervised)
    progress.losses.append((step, losses["sample_mean"]))
    if log is not None:
        held_out.keep(output_dir, step, found)
        log.write_held_out(step, losses, time.perf_counter() - started, progress.best_step, held_out.tokens.key)


def _judge_step(train: TrainSection, engine: ClusterEngine, step: int, num_left_out: int, ranks: Ranks) -> None:
    """A step whose loss or gradient is not finite: tolerated if DeepSpeed left it out, and only so many in a row.

    Raises:
        NotFiniteError: naming the samples.
    """
    record = engine.last_record
    ids = [engine.schedule.plan.ids[r] for r in record.rows]
    what = f"step {step}: loss {record.loss}, gradient norm {engine.grad_norm} on samples {', '.join(ids[:8])}"
    what += f", ... ({len(ids)})" if len(ids) > 8 else ""
    if not engine.step_applied and num_left_out <= train.max_nonfinite_steps:
        limit = train.max_nonfinite_steps
        ranks.print(f"[train] {what}: left out, {num_left_out} in a row of train.max_nonfinite_steps {limit}")
        return
    raise NotFiniteError(
        f"{what}: nothing was saved since the last checkpoint; look at these samples, or start again with a lower train.lr "
        "in another --output_dir"
    )


@contextmanager
def _explained(recipe: Recipe) -> Iterator[None]:
    """Turn what kills a training loop into what to change."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).split("\n")[0]
        if "DataLoader worker" in text and ("exited unexpectedly" in text or "killed by signal" in text):
            raise ValueError(
                f"a data loader worker died ({text}): if the machine is short of memory, lower train.num_workers from "
                f"{recipe.train.num_workers}; the same command continues from the last checkpoint"
            ) from error
        if not is_out_of_memory(error):
            raise
        smaller, checkpointing = recipe.smaller_micro_batch, recipe.train.gradient_checkpointing
        same = [f"lower {smaller} (the global batch and the result stay the same)"] if smaller else []
        same += [] if checkpointing else ["set train.gradient_checkpointing to true"]
        raise ValueError(
            "out of memory in training: "
            + (f"{', '.join(same)}; the same command continues from the last checkpoint. Or " if same else "")
            + f"use a higher ZeRO stage (deepspeed.config) or more GPUs, in another --output_dir ({text})"
        ) from error


def _timed(loader: ClusterLoader, watch: Watch) -> Iterator[tuple[dict[str, Any], float]]:
    """Micro-batches with the seconds that they were waited for."""
    batches = iter(loader)
    while True:
        watch.at(f"step {loader.step + 1}, {LOADING}")
        asked = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - asked
