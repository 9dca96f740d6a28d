"""Full data: every sample once an epoch; no selection, no weights."""

from __future__ import annotations

from ..plan import Plan
from .setting import Budget, Cost, Setting


def select(setting: Setting, budget: Budget, seed: int) -> Plan:
    """All samples; budget and seed change nothing."""
    return setting.plan("full", setting.usable, Cost())


def select_for_steps(setting: Setting, budget: Budget, seed: int) -> Plan:
    """As many samples as the other arms see in all their epochs, taken from all the data.

    They are passed over as seldom as they can be: once, without a repetition, where the data suffice. Otherwise every pass
    draws its equal part anew. The manifest's "passes" are the epochs that the recipe must then have.
    """
    seen = budget.num_samples * setting.recipe.train.epochs
    passes = -(-seen // len(setting.usable))
    rows = setting.shuffled(seed)[: seen // passes]
    redraw_seed = None if passes == 1 else seed
    return setting.plan("full", rows, Cost(), {"passes": passes}, redraw_seed=redraw_seed)
