"""Stage 13b: what a run writes down of every step, and the count at its end of what was trained on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .engine import StepRecord
from .files import write_text
from .plan import Plan
from .schedule import Schedule

_LOG_LINES = 20  # of a run whose output is not a terminal


class RunLog:
    """log.jsonl and census.jsonl of a run; entries of steps that a resumed run does again are dropped."""

    def __init__(self, output_dir: Path, first: int, schedule: Schedule):
        self.schedule = schedule
        self.every = max(1, schedule.num_steps // _LOG_LINES)
        self.files = {name: self._reopen(output_dir / f"{name}.jsonl", first) for name in ("log", "census")}

    def write(
        self, step: int, record: StepRecord, lr: float, grad_norm: float | None, seconds: float, data_wait_s: float
    ) -> None:
        """Add the step whose number, counted from 0, is `step`; now and then print it."""
        epoch = step // self.schedule.steps_per_epoch
        entry = {
            "step": step + 1, "epoch": epoch, "loss": record.loss, "lr": lr, "grad_norm": grad_norm,
            "tokens_per_s": record.num_tokens / seconds, "data_wait_s": data_wait_s, "seconds": seconds,
            "weight_sum": record.weight_sum, "num_samples": record.num_samples, "num_tokens": record.num_tokens,
            "num_supervised_tokens": record.num_supervised_tokens, "cluster_loss": record.cluster_loss,
            "cluster_samples": record.cluster_samples, "micro_steps": record.num_micro_steps, "fillers": record.num_fillers,
            "predicted_skew": record.predicted_skew, "skew": record.skew,
        }
        self._append("log", entry)
        self._append("census", {"step": step + 1, "epoch": epoch, "weight_sum": record.weight_sum, "rows": record.rows})
        last = step + 1 == self.schedule.num_steps
        if (step + 1) % self.every == 0 or last:
            tqdm.write(
                f"[train] step {step + 1}/{self.schedule.num_steps}  loss {record.loss:.4f}  lr {lr:.2e}  "
                f"grad norm {grad_norm if grad_norm is not None else float('nan'):.3f}  {entry['tokens_per_s']:.0f} tokens/s"
            )

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

    @staticmethod
    def _reopen(path: Path, first: int) -> Any:
        kept = []
        for line in path.read_text().splitlines() if path.is_file() else []:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # the line that a killed run was writing
                continue
            if entry["step"] <= first:
                kept.append(line + "\n")
        write_text(path, "".join(kept))
        return path.open("a")


def census(output_dir: Path, plan: Plan, num_steps: int) -> list[str]:
    """Count, from what every step recorded, how often each kept sample was trained on.

    Returns:
        one line an epoch.
    Raises:
        ValueError: if a kept sample was not seen exactly once in a finished epoch.
    """
    path = output_dir / "census.jsonl"
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    if [entry["step"] for entry in steps] != list(range(1, num_steps + 1)):
        return [f"{path} does not hold each of {num_steps} steps once: it was changed after the run, so nothing is counted"]
    lines = []
    for epoch in sorted({entry["epoch"] for entry in steps}):
        rows = np.array([row for entry in steps if entry["epoch"] == epoch for row in entry["rows"]], dtype=np.int64)
        seen = np.bincount(rows, minlength=len(plan))
        kept = plan.kept_in(epoch)
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
