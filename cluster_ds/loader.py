"""Stage 9: this rank's micro-batches -> tensors; the position is one integer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from .allocation import Allocator, MicroBatch
from .schedule import Schedule
from .tokens import IGNORE_INDEX, pack_batch, pad_batch
from .watch import leave_workers_alone

_REFUSED = "refused"
Collate = Callable[..., dict[str, torch.Tensor]]


class MicroBatches(Dataset):
    """This rank's micro-batches of a step, by its number. A pure function, so any worker can make any."""

    def __init__(
        self, dataset: Any, schedule: Schedule, collate: Collate, allocator: Allocator, dp_rank: int, count_labels: bool
    ):
        self.dataset, self.schedule, self.collate = dataset, schedule, collate
        self.allocator, self.dp_rank, self.count_labels = allocator, dp_rank, count_labels

    def __len__(self) -> int:
        """Steps of the whole run."""
        return self.schedule.num_steps

    def __getitem__(self, step: int) -> list[dict[str, Any]]:
        """What the model takes, and what the loss needs; a refusal travels from a worker as its text."""
        try:
            return self._make(step)
        except ValueError as error:
            return [{_REFUSED: str(error)}]

    def _make(self, step: int) -> list[dict[str, Any]]:
        batch = self.schedule.batch(step)
        shares = self.allocator.cut(self.schedule, batch)
        loads = self.allocator.loads(self.schedule.plan, shares)
        mine = shares[self.dp_rank]
        return [
            {
                **self._collated(part),
                "sample_weight": torch.from_numpy(part.weights),
                "is_filler": torch.from_numpy(part.is_filler),
                "row": torch.from_numpy(part.rows),
                "cluster": torch.from_numpy(self.schedule.plan.cluster[part.rows].astype(np.int64)),
                "denominator": batch.denominator,
                "predicted_skew": float(loads.max() / loads.mean()),
                "step": step,
                "micro_step": micro_step,
                "is_last": micro_step == len(mine) - 1,
            }
            for micro_step, part in enumerate(mine)
        ]

    def _collated(self, part: MicroBatch) -> dict[str, torch.Tensor]:
        samples = [self._sample(int(row)) for row in part.rows]
        return self.collate(samples) if self.allocator.packing is None else self.collate(samples, part.pack)

    def _sample(self, row: int) -> dict[str, Any]:
        sample, plan = self.dataset[row], self.schedule.plan
        if "id" in sample and sample["id"] != plan.ids[row]:
            raise ValueError(f"dataset[{row}] is sample {sample['id']}, but the plan has {plan.ids[row]} in this row")
        if not self.count_labels:
            return sample
        if len(sample["input_ids"]) != plan.num_tokens[row]:
            raise ValueError(
                f"sample {plan.ids[row]} has {len(sample['input_ids'])} tokens, the plan says {plan.num_tokens[row]}: "
                "make the plan with the lengths of these input_ids"
            )
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
        allocator: cuts them.
        dp_rank: this rank.
        collate: samples -> tensors, e.g. `pad`. With packing: samples and the pack of each, e.g. `pack`.
        num_workers: processes that prepare steps ahead; 0 prepares them in this one.
        pin_memory: for copies to a GPU.
        count_labels: check that each sample's labels are as many as the plan says.
    """

    def __init__(
        self, dataset: Any, schedule: Schedule, allocator: Allocator, *, dp_rank: int, collate: Collate,
        num_workers: int = 0, pin_memory: bool = False, count_labels: bool = True,
    ):
        if len(dataset) != len(schedule.plan):
            raise ValueError(f"the data set has {len(dataset)} samples, the plan {len(schedule.plan)}")
        self.schedule = schedule
        self.batches = MicroBatches(dataset, schedule, collate, allocator, dp_rank, count_labels)
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.step = 0  # whose micro-batches have all been handed out

    def __len__(self) -> int:
        """Micro-batches that remain; with packing every step's are counted, which takes milliseconds a step."""
        batches = self.batches
        remaining = range(self.step, self.schedule.num_steps)
        if batches.allocator.packing is None:
            remaining = remaining[:1]
            per_step = batches.allocator.cut(self.schedule, self.schedule.batch(self.step)) if remaining else [[]]
            return (self.schedule.num_steps - self.step) * len(per_step[0])
        return sum(len(batches.allocator.cut(self.schedule, self.schedule.batch(step))[0]) for step in remaining)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Micro-batches from the current step to the end of the last epoch."""
        steps = range(self.step, len(self.batches))
        for micro_batches in DataLoader(
            self.batches, batch_size=None, sampler=steps, num_workers=self.num_workers, pin_memory=self.pin_memory,
            worker_init_fn=leave_workers_alone, collate_fn=_as_is,
            generator=torch.Generator(),  # its own: a draw from the global one would break bit-exact resume
        ):
            for batch in micro_batches:
                if _REFUSED in batch:
                    raise ValueError(batch[_REFUSED])
                self.step += batch["is_last"]
                yield batch

    def state_dict(self) -> dict[str, int]:
        """The position, valid at step boundaries."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue behind `state["step"]` finished steps."""
        self.step = state["step"]


def _as_is(batch: Any) -> Any:
    return batch


def stack(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Samples of equal shapes as a batch; the ids stay behind."""
    return default_collate([{key: value for key, value in sample.items() if key != "id"} for sample in samples])


def pad(pad_id: int) -> Collate:
    """The default collate: right-padding."""
    return partial(_padded, pad_id=pad_id)  # which loader workers can be sent


def pack(pad_id: int, flat: bool) -> Collate:
    """Samples end to end in packs; with `flat` the packs are one line, as variable-length attention kernels want it."""
    return partial(_packed, pad_id=pad_id, flat=flat)


def _padded(samples: list[dict[str, Any]], pad_id: int) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in pad_batch(samples, pad_id).items()}


def _packed(samples: list[dict[str, Any]], lines: np.ndarray, pad_id: int, flat: bool) -> dict[str, torch.Tensor]:
    lines = np.zeros_like(lines) if flat else lines
    return {key: torch.from_numpy(value) for key, value in pack_batch(samples, lines, pad_id).items()}
