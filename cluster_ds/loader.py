"""Stage 8: schedule + samples -> tensors of this rank; the position is one integer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from .schedule import RankBatch, Schedule, accumulation_steps, rank_batch
from .tokens import IGNORE_INDEX, pad_batch
from .watch import leave_workers_alone

_REFUSED = "refused"
Collate = Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]


class MicroBatches(Dataset):
    """This rank's micro-batches by their number: step x G + micro_step. A pure function, so any worker can make any."""

    def __init__(self, dataset: Any, schedule: Schedule, collate: Collate, count_labels: bool = True, **cut: Any):
        """`cut` is what `rank_batch` wants beside the batch."""
        self.dataset, self.schedule, self.collate, self.cut = dataset, schedule, collate, cut
        self.count_labels = count_labels
        self.accumulation = accumulation_steps(
            schedule.global_batch_size, cut["micro_batch_size"], cut["dp_world_size"]
        )
        self._step: tuple[int, RankBatch, float] | None = None

    def __len__(self) -> int:
        """Micro-batches of the whole run."""
        return self.schedule.num_steps * self.accumulation

    def __getitem__(self, number: int) -> dict[str, Any]:
        """A micro-batch: what the model takes, and what the loss needs; a refusal travels from a worker as its text."""
        try:
            return self._make(number)
        except ValueError as error:
            return {_REFUSED: str(error)}

    def _make(self, number: int) -> dict[str, Any]:
        step, micro_step = divmod(number, self.accumulation)
        if self._step is None or self._step[0] != step:
            batch = self.schedule.batch(step)
            self._step = (step, rank_batch(self.schedule, batch, **self.cut), batch.denominator)
        _, mine, denominator = self._step
        rows = mine.rows[micro_step]
        return {
            **self.collate([self._sample(int(row)) for row in rows]),
            "sample_weight": torch.from_numpy(mine.weights[micro_step]),
            "is_filler": torch.from_numpy(mine.is_filler[micro_step]),
            "row": torch.from_numpy(rows),
            "cluster": torch.from_numpy(self.schedule.plan.cluster[rows].astype(np.int64)),
            "denominator": denominator,
            "step": step,
            "micro_step": micro_step,
        }

    def _sample(self, row: int) -> dict[str, Any]:
        sample, plan = self.dataset[row], self.schedule.plan
        if "id" in sample and sample["id"] != plan.ids[row]:
            raise ValueError(f"dataset[{row}] is sample {sample['id']}, but the plan has {plan.ids[row]} in this row")
        if not self.count_labels:
            return sample
        supervised = int(np.count_nonzero(np.asarray(sample["labels"])[1:] != IGNORE_INDEX))
        if supervised != plan.num_supervised_tokens[row]:
            raise ValueError(
                f"sample {plan.ids[row]} has {supervised} supervised tokens, the plan says "
                f"{plan.num_supervised_tokens[row]}: make the plan from these tokens (make_plan's num_supervised_tokens, "
                "lengths - 1 by default, counts the labels behind the first position)"
            )
        return sample


class ClusterLoader:
    """Iterates over this rank's micro-batches of all epochs, from the restored step on.

    Args:
        dataset: dataset[i] -> {"input_ids", "labels"[, "id"]} belongs to row i of the plan.
        schedule: the global batches.
        dp_rank, dp_world_size: this rank and W.
        micro_batch_size: samples per rank per forward.
        allocation: "cluster" or "tokens", see `schedule.rank_batch`.
        collate: samples -> tensors; right-padding by default.
        pad_id: fills the default collate's padding.
        num_workers: processes that prepare micro-batches ahead; 0 prepares them in this one.
        pin_memory: for copies to a GPU.
        count_labels: check that each sample's labels are as many as the plan says.
    """

    def __init__(
        self, dataset: Any, schedule: Schedule, *, dp_rank: int, dp_world_size: int, micro_batch_size: int,
        allocation: str = "cluster", collate: Collate | None = None, pad_id: int = 0, num_workers: int = 0,
        pin_memory: bool = False, count_labels: bool = True,
    ):
        if len(dataset) != len(schedule.plan):
            raise ValueError(f"the data set has {len(dataset)} samples, the plan {len(schedule.plan)}")
        self.schedule = schedule
        self.batches = MicroBatches(
            dataset, schedule, collate or _Pad(pad_id), dp_rank=dp_rank, dp_world_size=dp_world_size,
            micro_batch_size=micro_batch_size, allocation=allocation, count_labels=count_labels,
        )
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self._position = 0  # micro-batches handed out

    @property
    def step(self) -> int:
        """Steps whose micro-batches have all been handed out."""
        return self._position // self.batches.accumulation

    def __len__(self) -> int:
        """Micro-batches that remain."""
        return len(self.batches) - self._position

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Micro-batches from the current position to the end of the last epoch."""
        numbers = range(self._position, len(self.batches))
        for batch in DataLoader(
            self.batches, batch_size=None, sampler=numbers, num_workers=self.num_workers, pin_memory=self.pin_memory,
            worker_init_fn=leave_workers_alone,
            generator=torch.Generator(),  # its own: a draw from the global one would break bit-exact resume
        ):
            if _REFUSED in batch:
                raise ValueError(batch[_REFUSED])
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position, valid at step boundaries."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue behind `state["step"]` finished steps."""
        self._position = state["step"] * self.batches.accumulation


def stack(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Samples of equal shapes as a batch; the ids stay behind."""
    return default_collate([{key: value for key, value in sample.items() if key != "id"} for sample in samples])


class _Pad:
    """The default collate; a class, so that loader workers can be sent it."""

    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {key: torch.from_numpy(value) for key, value in pad_batch(samples, self.pad_id).items()}
