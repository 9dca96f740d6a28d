"""Stage 13d: the held-out loss while training goes on: which step was best, and when to stop early.

The ranks share the samples and forward the same number of batches, as ZeRO-3 demands. Nothing random is drawn, so a run that
looks at held-out samples trains exactly as one that does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from .checkpoint import is_whole
from .distributed import Ranks
from .engine import ClusterEngine
from .files import commit_file
from .run_log import read_lines
from .sample_losses import gather_losses
from .shards import length_batches
from .tokens import TokenTable, pad_batch


@dataclass
class Progress:
    """The held-out losses of a run so far.

    Attributes:
        patience: evaluations in a row without a new least after which training ends; None: never.
        losses: (step, mean loss over samples) of each evaluation, in order.
        not_kept: steps without a checkpoint.
    """

    patience: int | None
    losses: list[tuple[int, float]] = field(default_factory=list)
    not_kept: set[int] = field(default_factory=set)

    @property
    def best_step(self) -> int | None:
        """The first step with the least loss."""
        return _first_least(self.losses)

    @property
    def best_kept(self) -> int | None:
        """The first step with the least loss of those that have a checkpoint."""
        return _first_least([(step, loss) for step, loss in self.losses if step not in self.not_kept])

    @property
    def is_exhausted(self) -> bool:
        """Whether patience has run out."""
        if self.patience is None or self.best_step is None:
            return False
        return sum(step > self.best_step for step, _ in self.losses) >= self.patience


def _first_least(losses: list[tuple[int, float]]) -> int | None:
    finite = [(loss, step) for step, loss in losses if np.isfinite(loss)]
    return min(finite)[1] if finite else None


def read_progress(output_dir: Path, first: int, patience: int | None, data: str | None) -> Progress:
    """What a run has seen, up to the step from which it goes on, of the held-out tokens with the key `data`."""
    entries = read_lines(output_dir / "held_out.jsonl")
    losses = [(e["step"], e["sample_mean"]) for e in entries if e["step"] <= first and e["data"] == data]
    checkpoints = output_dir / "checkpoints"
    return Progress(patience, losses, {step for step, _ in losses if not is_whole(checkpoints, step)})


class HeldOut:
    """Held-out samples, batched once."""

    def __init__(self, tokens: TokenTable, tokens_per_batch: int, pad_id: int, ranks: Ranks):
        self.tokens, self.pad_id, self.ranks = tokens, pad_id, ranks
        batches = length_batches(tokens.num_tokens, tokens_per_batch)
        mine = batches[ranks.rank :: ranks.world_size]
        most = -(-len(batches) // ranks.world_size)
        self.batches = mine + [batches[-1]] * (most - len(mine))  # another rank's: its sums are the same

    def losses(self, engine: ClusterEngine) -> np.ndarray:  # collective
        """Float64 [N], the mean token loss of each sample, of the model as it is."""
        sums: dict[int, float] = {}
        with engine.evaluating():
            for rows in self.batches:
                arrays = pad_batch([self.tokens[int(row)] for row in rows], self.pad_id)
                found, _ = engine.sample_losses({name: torch.from_numpy(value) for name, value in arrays.items()})
                sums.update(zip(rows.tolist(), found.double().tolist(), strict=True))
        return gather_losses(sums, self.tokens, self.ranks)

    def keep(self, output_dir: Path, step: int, losses: np.ndarray) -> None:
        """Write the losses behind a step where `losses_of_steps` finds them."""
        path = _losses_file(output_dir, step)
        path.parent.mkdir(exist_ok=True)
        with commit_file(path) as part, part.open("wb") as file:
            np.save(file, losses)


def losses_of_steps(output_dir: Path, steps: list[int]) -> np.ndarray:
    """Float64 [steps, N], the held-out samples' mean token losses behind steps of a run."""
    return np.stack([np.load(_losses_file(output_dir, step)) for step in steps])


def _losses_file(output_dir: Path, step: int) -> Path:
    return output_dir / "held_out" / f"step-{step:08d}.npy"
