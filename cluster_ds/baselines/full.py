"""Full data: every sample once an epoch; no selection, no weights."""

from __future__ import annotations

from ..plan import Plan
from .setting import Budget, Cost, Setting


def select(setting: Setting, budget: Budget, seed: int) -> Plan:
    """All samples; budget and seed change nothing."""
    return setting.plan("full", setting.usable, Cost())


def select_for_steps(setting: Setting, budget: Budget, seed: int) -> Plan:
    """As many optimizer steps as the other arms take: every epoch draws the budget anew from all samples."""
    order = setting.shuffled(seed)
    return setting.plan("full", order[: budget.num_samples], Cost(), {"steps of": budget.num_samples}, redraw_seed=seed)
