"""Stage 13b: what a run writes down of every step, and the count at its end of what was trained on."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .diagnosis import Diagnosis
from .engine import StepRecord
from .files import write_text
from .plan import Plan
from .schedule import Schedule

_LOG_LINES = 20  # of a run whose output is not a terminal
_FILES = ("log", "census", "held_out", "spikes")
_SPIKE_STEPS, _SPIKE_FEWEST, _SPIKE_DEVIATIONS, _SPIKE_SHARE = 50, 10, 6.0, 0.02
_NAMED_SAMPLES = 8
Flops = Callable[[np.ndarray, int], float]


class RunLog:
    """log, census, held_out and spikes (.jsonl) of a run; entries of steps that a resumed run does again are dropped.

    Args:
        output_dir: the run's folder.
        first: steps that are done already.
        schedule: of the run.
        world_size: W.
        flops: (lengths of the trained samples, supervised tokens) -> FLOPs of the step; None where the shape is unknown.
        peak: FLOP/s of a device; None where it is unknown.
        monitor: DeepSpeed's, which is given what is a number.
    """

    def __init__(
        self, output_dir: Path, first: int, schedule: Schedule, *, world_size: int = 1, flops: Flops | None = None,
        peak: float | None = None, monitor: Any = None,
    ):
        self.schedule, self.world_size, self.flops, self.peak, self.monitor = schedule, world_size, flops, peak, monitor
        self.every = max(1, schedule.num_steps // _LOG_LINES)
        self.files = {name: self._reopen(output_dir / f"{name}.jsonl", first) for name in _FILES}
        self.recent: deque[float] = deque(maxlen=_SPIKE_STEPS)  # losses
        losses = [entry["loss"] for entry in read_lines(output_dir / "log.jsonl")]
        self.recent.extend(loss for loss in losses if math.isfinite(loss))

    def write(
        self, step: int, record: StepRecord, lr: float, grad_norm: float | None, seconds: float, data_wait_s: float,
        diagnosis: Diagnosis | None = None,
    ) -> None:
        """Add the step whose number, counted from 0, is `step`; now and then print it."""
        lengths = self.schedule.plan.num_tokens[record.rows]
        flops = None if self.flops is None else self.flops(lengths, record.num_supervised_tokens)
        known = flops is not None and self.peak is not None
        epoch = step // self.schedule.steps_per_epoch
        entry = {
            "step": step + 1, "epoch": epoch, "loss": record.loss, "lr": lr, "grad_norm": grad_norm,
            "tokens_per_s": record.num_tokens / seconds,
            "tokens_per_s_per_rank": record.num_tokens / seconds / self.world_size,
            "mfu": flops / seconds / self.world_size / self.peak if known else None,  # type: ignore[operator]
            "model_flops": flops, "data_wait_s": data_wait_s, "seconds": seconds,
            "weight_sum": record.weight_sum, "num_samples": record.num_samples, "num_tokens": record.num_tokens,
            "num_supervised_tokens": record.num_supervised_tokens, "cluster_loss": record.cluster_loss,
            "cluster_samples": record.cluster_samples, "micro_steps": record.num_micro_steps, "fillers": record.num_fillers,
            "predicted_skew": record.predicted_skew, "skew": record.skew,
        }
        if diagnosis is not None:
            found = asdict(diagnosis)
            entry |= {"rank_cosine": diagnosis.mean_cosine, "diagnosis_s": found.pop("seconds"), **found}
        self._append("log", entry)
        self._append("census", {"step": step + 1, "epoch": epoch, "weight_sum": record.weight_sum, "rows": record.rows})
        self._tell_monitor(step + 1, entry)
        self._look_for_spike(step + 1, record)
        last = step + 1 == self.schedule.num_steps
        if (step + 1) % self.every == 0 or last:
            tqdm.write(
                f"[train] step {step + 1}/{self.schedule.num_steps}  loss {record.loss:.4f}  lr {lr:.2e}  "
                f"grad norm {grad_norm if grad_norm is not None else float('nan'):.3f}  {entry['tokens_per_s']:.0f} tokens/s"
            )

    def write_held_out(
        self, step: int, losses: dict[str, float], seconds: float, best_step: int | None, data: str
    ) -> None:
        """Add an evaluation behind `step` finished steps, on the tokens with the key `data`."""
        self._append("held_out", {"step": step, **losses, "seconds": seconds, "data": data})
        self._tell_monitor(step, {f"held_out_{name}": losses[name] for name in ("sample_mean", "token_mean")})
        best = "the least so far" if best_step == step else f"the least was at step {best_step}"
        tqdm.write(f"[held-out] step {step}: loss {losses['sample_mean']:.4f}, {best}")

    def sync(self) -> None:
        """Flush both files to disk."""
        for file in self.files.values():
            os.fsync(file.fileno())

    def close(self) -> None:
        """At the end of the run."""
        for file in self.files.values():
            file.close()

    def _append(self, name: str, entry: dict[str, Any]) -> None:
        self.files[name].write(json.dumps(entry) + "\n")
        self.files[name].flush()

    def _tell_monitor(self, step: int, entry: dict[str, Any]) -> None:
        if self.monitor is not None:
            numbers = {key: value for key, value in entry.items() if isinstance(value, int | float) and key != "step"}
            numbers |= {f"cluster_loss/{c}": value for c, value in enumerate(entry.get("cluster_loss", []))}
            self.monitor.write_events([(f"cluster_ds/{name}", value, step) for name, value in numbers.items()])

    def _look_for_spike(self, step: int, record: StepRecord) -> None:
        """Name the samples of a step whose loss is far above the last steps'."""
        before = np.array(self.recent)
        if math.isfinite(record.loss):
            self.recent.append(record.loss)
        if len(before) < _SPIKE_FEWEST:
            return
        usual = float(np.median(before))
        deviation = max(1.4826 * float(np.median(np.abs(before - usual))), _SPIKE_SHARE * abs(usual))
        if math.isfinite(record.loss) and record.loss <= usual + _SPIKE_DEVIATIONS * deviation:
            return
        plan, losses = self.schedule.plan, np.nan_to_num(record.losses, nan=np.inf)
        worst = [(record.rows[i], record.losses[i]) for i in np.argsort(-losses, kind="stable")[:_NAMED_SAMPLES]]
        samples = [{"id": plan.ids[row], "loss": loss, "cluster": int(plan.cluster[row])} for row, loss in worst]
        entry = {"step": step, "loss": record.loss, "usual": usual, "deviation": deviation, "samples": samples}
        self._append("spikes", entry)
        tqdm.write(
            f"[train] step {step}: loss {record.loss:.4f} where the last {len(before)} steps had {usual:.4f} +- "
            f"{deviation:.4f}; the worst sample is {samples[0]['id']} ({samples[0]['loss']:.2f}), spikes.jsonl names more"
        )

    @staticmethod
    def _reopen(path: Path, first: int) -> Any:
        kept = [json.dumps(entry) + "\n" for entry in read_lines(path) if entry["step"] <= first]
        write_text(path, "".join(kept))
        return path.open("a")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a .jsonl file of a run; none if it is not there."""
    entries = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:  # the line that a killed run was writing
            continue
    return entries


def census(output_dir: Path, plan: Plan, num_steps: int, stopped_early: bool = False) -> list[str]:
    """Count, from what every step recorded, how often each kept sample was trained on.

    Args:
        output_dir: the run's folder.
        plan: that it trained on.
        num_steps: that it took.
        stopped_early: the last epoch may lack samples.

    Returns:
        one line an epoch.
    Raises:
        ValueError: if a kept sample was not seen exactly once in a finished epoch.
    """
    path = output_dir / "census.jsonl"
    steps = read_lines(path)
    if [entry["step"] for entry in steps] != list(range(1, num_steps + 1)):
        return [f"{path} does not hold each of {num_steps} steps once: it was changed after the run, so nothing is counted"]
    lines = []
    for epoch in sorted({entry["epoch"] for entry in steps}):
        rows = np.array([row for entry in steps if entry["epoch"] == epoch for row in entry["rows"]], dtype=np.int64)
        seen = np.bincount(rows, minlength=len(plan))
        kept = plan.kept_in(epoch)
        if stopped_early and epoch == steps[-1]["epoch"]:
            kept = kept & (seen > 0)
        wrong = np.flatnonzero(seen != kept)
        if len(wrong):
            raise ValueError(
                f"census of epoch {epoch + 1}: {len(wrong)} samples were not seen as planned, the first is "
                f"{plan.ids[wrong[0]]} ({seen[wrong[0]]} times)"
            )
        weight = sum(entry["weight_sum"] for entry in steps if entry["epoch"] == epoch)
        shares = np.bincount(plan.cluster[rows], minlength=plan.num_clusters)
        lines.append(
            f"epoch {epoch + 1}: each of {len(rows)} kept samples once; per cluster {shares.tolist()}; weights sum to "
            f"{weight:.3f} (plan {plan.weight[kept].sum():.3f})"
        )
    return lines
