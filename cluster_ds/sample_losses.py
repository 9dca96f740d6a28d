"""Stage 3b: a model's loss on each of some samples, e.g. held-out ones: the forward passes of extraction, without proxies.

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from .distributed import Ranks
from .proxy import Room, cpu_threads_alike, run_batches
from .shards import length_batches
from .tokens import TokenTable


def sample_losses(
    tokens: TokenTable, load: Callable[[], PreTrainedModel], ranks: Ranks, *, pad_id: int, tokens_per_batch: int,
    cpu_threads: int,
) -> np.ndarray:  # collective
    """Float64 [N], a model's mean token loss of each sample, in nats; the same on every rank."""
    batches = length_batches(tokens.num_tokens, tokens_per_batch)[ranks.rank :: ranks.world_size]
    sums: dict[int, float] = {}
    if batches:
        with cpu_threads_alike(cpu_threads, ranks.device):
            model = load().eval()
            for rows, total in run_batches(model, tokens, batches, pad_id, ranks.device, Room(), summed_losses):
                sums.update(zip(rows.tolist(), total.tolist(), strict=True))
    return gather_losses(sums, tokens, ranks)


def gather_losses(sums: dict[int, float], tokens: TokenTable, ranks: Ranks) -> np.ndarray:  # collective
    """The mean token losses float64 [N], on every rank, from each rank's summed ones by row; all ranks' hold every row."""
    merged = {row: value for part in ranks.gather(sums) for row, value in part.items()}
    return np.array([merged[row] for row in range(len(tokens))]) / tokens.num_supervised


def mean_losses(losses: np.ndarray, num_supervised: np.ndarray) -> dict[str, float]:
    """Means of samples' losses.

    Args:
        losses: float64 [n], mean token losses.
        num_supervised: int64 [n], tokens that each is a mean of.
    Returns:
        "sample_mean", "token_mean" (nats) and "num_samples".
    """
    return {
        "sample_mean": float(losses.mean()), "token_mean": float(losses @ num_supervised / num_supervised.sum()),
        "num_samples": len(losses),
    }


def summed_losses(samples: torch.Tensor, _: torch.Tensor, losses: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Summed token losses of each sample float64 [B], on the host; what `run_batches` may be given to finish with."""
    return torch.zeros(num_samples, dtype=torch.float64).index_add(0, samples.cpu(), losses.double().cpu())
