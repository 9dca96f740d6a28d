"""Stage 9: weighted sums of token losses, and cross entropy without the [B, T, V] tensor.

One formula everywhere: a rank's loss of a micro-batch is W x numerator / D, with D over the whole optimizer step, so
that data parallelism's mean over ranks gives the gradient of

    sample mean:  1/D sum_i w_i (1/T_i) sum_t ce_it,   D = B_s
    token mean:   1/D sum_i w_i sum_t ce_it,           D = sum_i w_i T_i over the global batch.

Nothing is ever normalised per rank: weights that are constant on a rank would cancel. Shapes: B samples, T tokens, V
vocabulary, H hidden, n supervised positions of the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .tokens import IGNORE_INDEX

_CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}  # logits at a time: what caches hold, what keeps a GPU busy


def supervised_positions(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the model is asked for a token.

    Args:
        labels: int64 [B, T].

    Returns:
        int64 [n] each: the sample, the position whose output predicts the token (one before it), and the token.
    """
    samples, predictors = (labels[:, 1:] != IGNORE_INDEX).nonzero(as_tuple=True)
    return samples, predictors, labels[samples, predictors + 1]


def sample_losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross entropy of each sample.

    Args:
        logits: [B, T, V]; only supervised positions are raised to float32.
        labels: int64 [B, T].

    Returns:
        float [B], sum over supervised tokens, and int64 [B], their number T_i.
    """
    samples, predictors, targets = supervised_positions(labels)
    chosen = logits[samples, predictors]
    ce = F.cross_entropy(chosen if chosen.dtype == torch.float64 else chosen.float(), targets, reduction="none")
    sums = torch.zeros(len(labels), dtype=ce.dtype, device=ce.device).index_add(0, samples, ce)
    return sums, torch.bincount(samples, minlength=len(labels))


def weighted_terms(
    sums: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor, normalization: str
) -> torch.Tensor:
    """Each sample's term of the numerator, [B]: w_i l_i with l_i the mean ("sample_mean") or the sum ("token_mean")."""
    values = sums / counts.clamp(min=1) if normalization == "sample_mean" else sums
    return weights.to(values.dtype) * values


def chunked_cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Token losses from hidden states, a chunk of rows of logits at a time; no gradient.

    Args:
        hidden: [n, H], what lm_head reads.
        head: [V, H].
        bias: [V] or None.
        targets: int64 [n].

    Returns:
        float32 (float64 for float64 input) [n].
    """
    elements = _CHUNK_ELEMENTS.get(hidden.device.type, _CHUNK_ELEMENTS["cuda"])
    chunk = max(1, elements // len(head))
    out = []
    for start in range(0, len(hidden), chunk):
        logits = F.linear(hidden[start : start + chunk], head, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        out.append(F.cross_entropy(logits, targets[start : start + chunk], reduction="none"))
    return torch.cat(out) if out else hidden.new_zeros(0, dtype=torch.float32)
