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
from transformers import get_scheduler
from transformers.integrations import HfDeepSpeedConfig

from .checkpoint import (
    Found,
    Keep,
    checkpoint_bytes,
    export_bytes,
    export_model,
    find_sound_checkpoint,
    load_checkpoint,
    release,
    save_checkpoint,
    set_aside_later,
)
from .diagnosis import GradientWatch
from .distributed import Ranks, ensure_process_group
from .ds_config import resolve_config, with_batch_arithmetic, zero_stage
from .engine import ClusterEngine, initialize, join_deepspeed
from .estimate import batch_text, skew_text
from .files import is_committed, read_json, require_ours, require_space, write_text
from .loader import ClusterLoader
from .lora import with_adapters
from .memory import is_out_of_memory, peak_memory
from .models import compile_layers, load_model, pad_token_id
from .monitor import monitor_config, open_log
from .plan import Plan
from .prepare import Prepared
from .recipe import Recipe, TrainSection
from .run_log import RunLog
from .schedule import Schedule
from .shapes import quadratic_cost
from .tokens import TokenTable
from .validation import HeldOut, Progress, read_progress
from .watch import LOADING, Stopped, Watch

# What may change between two starts of one run: none of it changes what is learnt.
_FREE_TO_CHANGE = {
    "micro_batch_size", "packing", "max_tokens", "tokens_per_micro_batch", "gradient_checkpointing",
    "num_workers", "checkpoint_every", "keep_checkpoints", "milestone_every", "export_dtype",
    "hang_timeout_s", "max_nonfinite_steps", "full_disk", "log_to", "diagnose_every", "tf32", "compile",
}


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
    total = ranks.on_main(lambda: _schedule(recipe, prepared.plan).num_steps)
    identity = {**_identity(recipe, prepared.plan, config), "num_steps": total}
    model_folder = output_dir / "model"
    exported = {**identity, "export_dtype": recipe.train.export_dtype}
    if recipe.evaluate.keep_best or recipe.evaluate.patience is not None:  # they decide what is exported
        exported["evaluate"] = recipe.evaluate.model_dump(include={"every", "keep_best", "patience"})
    finished = ranks.on_main(lambda: _finished(model_folder, exported))
    if finished is not None and resume is None:
        ranks.print(f"[train] reused the finished model {model_folder}")
        return TrainResult(model_folder, finished, 0.0, True, finished < total)
    ranks.on_main(lambda: require_ours(model_folder))
    found = find_sound_checkpoint(output_dir / "checkpoints", resume, ranks)
    step = ranks.on_main(lambda: _resume_step(output_dir, identity, recipe, ranks, found, resume is not None))
    ranks.on_main(lambda: write_text(output_dir / "recipe.yaml", recipe.to_yaml()))
    monitors = ranks.on_main(lambda: monitor_config(recipe, output_dir, step, config)) if step < total else {}

    ensure_process_group(ranks)
    started = time.perf_counter()
    dtype = getattr(torch, recipe.train.export_dtype)
    checkpoints = output_dir / "checkpoints"
    with peak_memory("training", ranks), _explained(recipe):
        engine, loader = build_training(recipe, prepared, config | monitors, ranks)
        if step < total:
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


def _finished(model_folder: Path, exported: dict[str, Any]) -> int | None:
    """Steps of the finished run whose model lies here; None if there is none, or it is another's."""
    if not is_committed(model_folder):
        return None
    manifest = read_json(model_folder / "manifest.json")
    same = all(manifest.get(k) == exported.get(k) for k in {*exported, "evaluate"})
    return manifest.get("steps_done", exported["num_steps"]) if same else None


def make_optimizer(model: torch.nn.Module, train: TrainSection, on_gpu: bool) -> torch.optim.Optimizer:
    """AdamW, or Adafactor as Hugging Face's Trainer sets it; vectors (norms, biases) are not decayed."""
    named = [(p, getattr(p, "ds_shape", p.shape)) for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p, shape in named if len(shape) >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p, shape in named if len(shape) < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if train.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=train.lr, scale_parameter=False, relative_step=False)
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.betas[0], train.betas[1]), eps=train.eps, fused=on_gpu)


def warmup_steps(train: TrainSection, num_steps: int) -> int:
    """Warm-up in optimizer steps."""
    if train.warmup_ratio is not None:
        return math.ceil(train.warmup_ratio * num_steps)
    return train.warmup_steps or 0


def _schedule(recipe: Recipe, plan: Plan) -> Schedule:
    t = recipe.train
    return Schedule(
        plan, global_batch_size=t.global_batch_size, epochs=t.epochs, seed=t.seed, normalization=t.normalization
    )


def _identity(recipe: Recipe, plan: Plan, config: dict[str, Any]) -> dict[str, Any]:
    """What makes two runs the same run; compared on resume."""
    train = {k: v for k, v in recipe.train.model_dump().items() if k not in _FREE_TO_CHANGE}
    lora = recipe.model.lora and recipe.model.lora.model_dump()
    model = plan.manifest["provenance"].get("model")
    return {**train, "plan": plan.hash, "model": model, "lora": lora, "zero_stage": zero_stage(config)}


def _resume_step(
    output_dir: Path, identity: dict[str, Any], recipe: Recipe, ranks: Ranks, found: Found, wanted: bool
) -> int:
    """Steps that a whole checkpoint of this very run has done; 0 to begin."""
    folder = output_dir / "checkpoints"
    ranks.print(*(f"[train] {note}" for note in found.notes))
    if found.step is None:
        if is_committed(output_dir / "model"):
            raise ValueError(
                f"{output_dir / 'model'} was made by another run and there is no checkpoint to continue: choose another "
                "--output_dir, or delete it"
            )
        ranks.print("[train] no checkpoint, starting at step 0")
        return 0
    manifest = read_json(folder / f"step-{found.step:08d}" / "manifest.json")
    then = manifest["identity"]
    different = [f"{k}: then {then.get(k)!r}, now {v!r}" for k, v in identity.items() if then.get(k) != v]
    if different:
        raise ValueError(
            f"{folder} belongs to another run:\n  "
            + "\n  ".join(different)
            + "\nset these back, or choose another --output_dir"
        )
    for later in set_aside_later(folder, found.step) if wanted else []:
        ranks.print(f"[train] {later.name} holds what this run will no longer lead to: kept, but passed over")
    now = batch_text(recipe, ranks.world_size)
    if manifest["batches"] != now:
        ranks.print(f"[train] until then {manifest['batches']}; now {now}; the global batches stay the same")
    ranks.print(f"[train] resuming behind step {found.step}")
    return found.step


def build_training(
    recipe: Recipe, prepared: Prepared, config: dict[str, Any], ranks: Ranks
) -> tuple[ClusterEngine, ClusterLoader]:  # collective
    """The engine and the loader of a recipe, at step 0."""
    t = recipe.train
    join_deepspeed()
    torch.manual_seed(t.seed)
    dtype = torch.bfloat16 if t.precision in ("bf16", "pure_bf16") else torch.float32
    sharded = zero_stage(config) == 3
    stated = with_batch_arithmetic(config, ranks.world_size, packed=t.packing)
    holder = HfDeepSpeedConfig(stated) if sharded else None  # while it lives, from_pretrained shards as it loads
    base = load_model(prepared.model_folder, recipe.model, dtype, None if sharded else ranks.device)
    model = base if recipe.model.lora is None else with_adapters(base, recipe.model.lora, t.seed)
    del holder
    if t.gradient_checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": False})
    if t.compile:
        compile_layers(base)
    torch.set_float32_matmul_precision("high" if t.tf32 else "highest")
    if t.precision == "bf16_autocast":
        torch.set_autocast_cache_enabled(False)  # the cache would cost 2 more bytes a parameter
    model.train()
    optimizer = make_optimizer(model, t, ranks.device.type == "cuda")

    def scheduler(inner: torch.optim.Optimizer, num_steps: int) -> Any:
        warmup = warmup_steps(t, num_steps)
        name = "constant_with_warmup" if t.schedule == "constant" else t.schedule
        return get_scheduler(name, inner, num_warmup_steps=warmup, num_training_steps=num_steps)

    engine, _, loader, _ = initialize(
        model=model, config=config, dataset=prepared.tokens, plan=prepared.plan, epochs=t.epochs, seed=t.seed,
        normalization=t.normalization, allocation=t.allocation, packing=recipe.packing,
        quadratic_cost=quadratic_cost(prepared.model_folder), optimizer=optimizer, lr_scheduler=scheduler,
        pad_id=pad_token_id(prepared.tokenizer), num_workers=t.num_workers,
    )
    ranks.print(
        f"[train] {batch_text(recipe, ranks.world_size)}; {engine.schedule.steps_per_epoch} steps an epoch, "
        f"{engine.schedule.num_steps} in all; ZeRO {zero_stage(config)}, {t.precision}, {t.optimizer}"
    )
    if ranks.is_main and ranks.world_size > 1:
        attention = loader.batches.allocator.quadratic_cost
        ranks.print(f"[train] {skew_text(prepared.plan, recipe, ranks.world_size, attention)}")
    return engine, loader


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
                _evaluate(held_out, engine, step, progress, log)  # collective
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
    held_out: HeldOut, engine: ClusterEngine, step: int, progress: Progress, log: RunLog | None
) -> None:  # collective
    started = time.perf_counter()
    losses = held_out.loss(engine)
    progress.losses.append((step, losses["sample_mean"]))
    if log is not None:
        log.write_held_out(step, losses, time.perf_counter() - started, progress.best_step, held_out.tokens.key)


def run_step(engine: ClusterEngine, batches: Iterator[dict[str, Any]]) -> None:  # collective
    """One optimizer step on the next micro-batches."""
    while True:
        engine.backward(engine(next(batches)))
        if engine.step():
            return


def _judge_step(train: TrainSection, engine: ClusterEngine, step: int, num_left_out: int, ranks: Ranks) -> None:
    """A step whose loss or gradient is not finite: tolerated if DeepSpeed left it out, and only so many in a row.

    Raises:
        ValueError: naming the samples.
    """
    record = engine.last_record
    ids = [engine.schedule.plan.ids[r] for r in record.rows]
    what = f"step {step}: loss {record.loss}, gradient norm {engine.grad_norm} on samples {', '.join(ids[:8])}"
    what += f", ... ({len(ids)})" if len(ids) > 8 else ""
    if not engine.step_applied and num_left_out <= train.max_nonfinite_steps:
        limit = train.max_nonfinite_steps
        ranks.print(f"[train] {what}: left out, {num_left_out} in a row of train.max_nonfinite_steps {limit}")
        return
    raise ValueError(
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
