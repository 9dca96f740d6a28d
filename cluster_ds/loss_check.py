"""Stage 11a: what the first micro-batch must show before a model is trained: that its losses are what we take them for.

Two faults would make every step wrong without a word: logits that are more than output embeddings x hidden states, and
samples of a pack that see each other. Shapes: P lines, T tokens, n positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .loss import logits_cross_entropy, supervised_positions

_TOKEN_INPUTS = {"input_ids", "attention_mask", "position_ids"}  # of a model that takes nothing else, and can be checked
_CHECKED_TOKENS = 256  # logits of more would need memory that training does not
_TOLERANCE, _TOLERANCE_16_BITS = 1e-3, 0.1  # nats, of mean token losses computed in two ways


@torch.no_grad()
def require_right_losses(
    engine: Any, losses_at: Callable[..., torch.Tensor], inputs: dict[str, torch.Tensor], samples: torch.Tensor | None,
    lengths: np.ndarray,
) -> None:  # collective at stage 3
    """Refuse models whose loss would be wrong; the same number of forward passes on every rank.

    Args:
        engine: DeepSpeed's.
        losses_at: (inputs, lines, predictors, targets) -> token losses [n], as training computes them.
        inputs: of the first micro-batch, on the device; [P, T] each.
        samples: int64 [P, T], the sample of each token of a packed micro-batch; None without packing.
        lengths: tokens of each sample.
    Raises:
        ValueError: naming the model and the difference.
    """
    if not set(inputs) <= _TOKEN_INPUTS:
        return
    training, name = engine.module.training, type(engine.module).__name__
    engine.eval()
    start = {k: v[:1, :_CHECKED_TOKENS] for k, v in inputs.items()}
    asked = supervised_positions(start["input_ids"].cpu())
    logits = engine(**start, use_cache=False).logits
    own = logits_cross_entropy(logits, *(t.to(logits.device) for t in asked))
    _require_alike(
        losses_at(start, *asked), own, logits.dtype, f"{name}: its losses are not what its output embeddings make of its "
        "hidden states: it scales or caps its logits, which is not supported",
    )  # fmt: skip
    if samples is not None:
        last = int(samples[0].max())
        places = (samples[0] == last).nonzero()[:, 0][: int(lengths[last])]  # padding counts as sample 0's
        ids = inputs["input_ids"][:1, places.to(logits.device)]
        lines, predictors, targets = asked = supervised_positions(ids.cpu())
        alone = losses_at({"input_ids": ids}, *asked)
        among = losses_at({k: v[:1] for k, v in inputs.items()}, lines, places[predictors], targets)
        _require_alike(
            among, alone, logits.dtype, f"{name} with attention {engine.module.config._attn_implementation}: a sample's "
            "losses change when others stand before it in its pack: set train.packing to false, or "
            "model.attn_implementation to sdpa",
        )  # fmt: skip
    engine.train(training)


def _require_alike(found: torch.Tensor, expected: torch.Tensor, kind: torch.dtype, problem: str) -> None:
    difference = float((found - expected).abs().mean())
    if difference > (_TOLERANCE if kind in (torch.float32, torch.float64) else _TOLERANCE_16_BITS):
        raise ValueError(f"{problem} (by {difference:.3g} nats a token)")  # NaN passes here and is met in its step
