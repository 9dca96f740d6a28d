"""Stage 10: weighted sums of token losses, and cross entropy without the [B, T, V] tensor.

One formula everywhere: a rank's loss of a micro-batch is W x numerator / D, with D over the whole optimizer step, so
that data parallelism's mean over ranks gives the gradient of

    sample mean:  1/D sum_i w_i (1/T_i) sum_t ce_it,   D = B_s
    token mean:   1/D sum_i w_i sum_t ce_it,           D = sum_i w_i T_i over the global batch.

Nothing is ever normalised per rank: weights that are constant on a rank would cancel. Shapes: B samples, T tokens, V
vocabulary, H hidden, n supervised positions of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from .shapes import CHUNK_ELEMENTS
from .tokens import IGNORE_INDEX


def supervised_positions(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the model is asked for a token.

    Args:
        labels: int64 [B, T].

    Returns:
        int64 [n] each: the sample, the position whose output predicts the token (one before it), and the token.
    """
    samples, predictors = (labels[:, 1:] != IGNORE_INDEX).nonzero(as_tuple=True)
    return samples, predictors, labels[samples, predictors + 1]


def logits_cross_entropy(
    logits: torch.Tensor, lines: torch.Tensor, predictors: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Token losses [n] at `supervised_positions` of logits [B, T, V]; only these are raised to float32."""
    chosen = logits[lines, predictors]
    return F.cross_entropy(chosen.to(_loss_dtype(chosen)), targets, reduction="none")


def weighted_terms(
    sums: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor, normalization: str
) -> torch.Tensor:
    """Each sample's term of the numerator, [B]: w_i l_i with l_i the mean ("sample_mean") or the sum ("token_mean")."""
    values = sums / counts.clamp(min=1) if normalization == "sample_mean" else sums
    return weights.to(values.dtype) * values


def chunked_cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Token losses from hidden states, a chunk of rows of logits at a time, forward and backward.

    The backward pass computes each chunk's logits again, so that any weight a loss is given afterwards reaches the head.

    Args:
        hidden: [n, H], what lm_head reads.
        head: [V, H].
        bias: [V] or None.
        targets: int64 [n].

    Returns:
        float32 (float64 for float64 input) [n].
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # once, not a chunk at a time
        kind = torch.get_autocast_dtype(device)
        hidden, head, bias = hidden.to(kind), head.to(kind), None if bias is None else bias.to(kind)
    with torch.autocast(device, enabled=False):
        return _ChunkedCrossEntropy.apply(hidden, head, bias, targets)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, head, bias, targets)
        out = torch.empty(len(hidden), dtype=_loss_dtype(hidden), device=hidden.device)
        for rows, logits in _chunks_of_logits(hidden, head, bias):
            out[rows] = F.cross_entropy(logits, targets[rows], reduction="none")
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        hidden, head, bias, targets = ctx.saved_tensors
        for_hidden, for_head, for_bias, _ = ctx.needs_input_grad
        kind = _loss_dtype(hidden)
        d_hidden = torch.empty_like(hidden) if for_hidden else None
        d_head = torch.zeros_like(head, dtype=kind) if for_head else None
        d_bias = torch.zeros_like(bias, dtype=kind) if for_bias and bias is not None else None
        for rows, logits in _chunks_of_logits(hidden, head, bias):
            d_logits = logits.softmax(dim=1)
            d_logits[torch.arange(len(d_logits), device=d_logits.device), targets[rows]] -= 1
            d_logits *= gradient[rows, None]
            if d_bias is not None:
                d_bias += d_logits.sum(dim=0)
            d_logits = d_logits.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[rows] = d_logits @ head
            if d_head is not None and d_head.dtype == hidden.dtype:
                d_head.addmm_(d_logits.T, hidden[rows])
            elif d_head is not None:
                d_head += d_logits.T @ hidden[rows]
        return (
            d_hidden, None if d_head is None else d_head.to(head.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype), None,
        )


def _loss_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _chunks_of_logits(
    hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of rows, and their logits in the loss's type."""
    elements = CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cuda"])
    size = max(1, elements // len(head))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        yield rows, F.linear(hidden[rows], head, bias).to(_loss_dtype(hidden))


class LossHead:
    """Lets a model's output embeddings give token losses where they are asked for, so that no [B, T, V] tensor exists.

    It takes the place of the layer's `forward`: hooks on the layer, ZeRO-3's gathering of its weights among them, fire as
    they would. Without a question the layer gives logits as before.
    """

    def __init__(self, head: torch.nn.Linear):
        self._head, self._logits = head, head.forward
        self._asked: tuple[torch.Size, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        head.__dict__["forward"] = self._forward

    @contextmanager
    def asked(
        self, shape: torch.Size, lines: torch.Tensor, predictors: torch.Tensor, targets: torch.Tensor
    ) -> Iterator[None]:
        """The forward pass inside gives the losses [n] of `supervised_positions` of ids of this shape in place of logits.

        Raises:
            ValueError: if the model puts positions of its own among them, or passes its output embeddings by.
        """
        self._asked = (shape, lines, predictors, targets)
        try:
            yield
            if self._asked is not None:
                raise ValueError("the model does not call its output embeddings' forward: its loss cannot be computed there")
        finally:
            self._asked = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._asked is None:
            return self._logits(hidden)
        (shape, lines, predictors, targets), self._asked = self._asked, None
        if hidden.shape[:2] != shape:
            raise ValueError(
                f"the model makes hidden states of shape {list(hidden.shape[:2])} of ids of shape {list(shape)}: models "
                "that put tokens of their own in front are not supported"
            )
        return chunked_cross_entropy(hidden[lines, predictors], self._head.weight, self._head.bias, targets)
