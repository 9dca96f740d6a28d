"""Stage 11a: what the first micro-batch must show before a model is trained: that its losses are what we take them for.

Two faults would make every step wrong without a word: logits that are more than output embeddings x hidden states, and
samples of a pack that see each other. Shapes: P lines, T tokens, n positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .loss import logits_cross_entropy, supervised_positions

_TOKEN_INPUTS = {"input_ids", "attention_mask", "position_ids"}  # of a model that takes nothing else, and can be checked
_CHECKED_TOKENS = 256  # logits of more would need memory that training does not
_TOLERANCE, _TOLERANCE_16_BITS = 1e-3, 0.1  # nats, of mean token losses computed in two ways


@torch.no_grad()
def require_right_losses(
    engine: Any, losses_at: Callable[..., torch.Tensor], inputs: dict[str, torch.Tensor], packed: bool
) -> None:  # collective at stage 3
    """Refuse models whose loss would be wrong; the same number of forward passes on every rank.

    Args:
        engine: DeepSpeed's.
        losses_at: (inputs, lines, predictors, targets) -> token losses [n], as training computes them.
        inputs: of the first micro-batch, on the device; [P, T] each.
        packed: also compare the second half of its first line alone with itself behind the first half, as packs are.
    Raises:
        ValueError: naming the model and the difference.
    """
    if not set(inputs) <= _TOKEN_INPUTS:
        return
    module = engine.module
    name = type(module).__name__
    with in_eval_mode(engine):
        start = {k: v[:1, :_CHECKED_TOKENS] for k, v in inputs.items()}
        asked = supervised_positions(start["input_ids"].cpu())
        logits = engine(**start, use_cache=False).logits
        kinds = {logits.dtype, *(p.dtype for p in module.parameters())}  # some raise logits that were computed in 16 bits
        limit = _TOLERANCE if kinds <= {torch.float32, torch.float64} else _TOLERANCE_16_BITS
        own = logits_cross_entropy(logits, *(t.to(logits.device) for t in asked))
        _require_alike(
            losses_at(start, *asked), own, limit, f"{name}: its losses are not what its output embeddings make of its "
            "hidden states: it scales or caps its logits, which is not supported",
        )  # fmt: skip
        if packed:
            ids = start["input_ids"]
            length = ids.shape[1]
            half = length // 2
            positions = torch.cat([torch.arange(half), torch.arange(length - half)])[None].to(ids.device)
            lines, predictors, targets = supervised_positions(ids[:, half:].cpu())
            alone = losses_at({"input_ids": ids[:, half:]}, lines, predictors, targets)
            among = losses_at({"input_ids": ids, "position_ids": positions}, lines, half + predictors, targets)
            _require_alike(
                among, alone, limit, f"{name} with attention {module.config._attn_implementation}: a sample's losses change "
                "when others stand before it in its pack: set train.packing to false, or model.attn_implementation to sdpa",
            )  # fmt: skip


@contextmanager
def in_eval_mode(engine: Any) -> Iterator[None]:
    """DeepSpeed's engine in evaluation mode; afterwards the modules that were in training mode are so again."""
    trained = [module for module in engine.module.modules() if module.training]
    engine.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def _require_alike(found: torch.Tensor, expected: torch.Tensor, limit: float, problem: str) -> None:
    difference = float((found - expected).abs().mean())
    if difference > limit:
        raise ValueError(f"{problem} (by {difference:.3g} nats a token)")  # NaN passes here and is met in its step
