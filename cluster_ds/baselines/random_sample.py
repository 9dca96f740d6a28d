"""Random samples: without replacement, one stratum, weight 1; drawn once, anew in every epoch, or with matched lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..plan import Plan
from .setting import Budget, Cost, Setting

_LENGTH_BINS = 20


def select(setting: Setting, budget: Budget, seed: int) -> Plan:
    """A uniform sample of the budget's size."""
    return setting.plan("random", budget.first_of(setting.shuffled(seed), setting.base.num_tokens), Cost())


def select_redrawn(setting: Setting, budget: Budget, seed: int) -> Plan:
    """A uniform sample of the budget's size in every epoch: what redrawing gains without any clusters."""
    rows = budget.first_of(setting.shuffled(seed), setting.base.num_tokens)
    return setting.plan("random-redraw", rows, Cost(), redraw_seed=seed)


def select_of_lengths(setting: Setting, budget: Budget, seed: int) -> Plan:
    """A random sample whose answers are as long as those that CluSTER keeps.

    The samples are cut into bins of equal numbers by their supervised tokens; of each bin as many are drawn as CluSTER's own
    plan keeps of it. What remains between this arm and CluSTER's is not the length of the answers. Ours: the periphery is
    known to favour short answers. With a budget of tokens the rows are taken in one order, spread evenly over the bins.
    """
    base, order = setting.base, setting.shuffled(seed)
    supervised = base.num_supervised_tokens
    edges = np.quantile(supervised[order], np.linspace(0, 1, _LENGTH_BINS + 1)[1:-1])
    bins = np.searchsorted(edges, supervised, side="right")
    wanted = np.bincount(bins[base.kept], minlength=_LENGTH_BINS)
    place = np.empty(len(order))  # of each row in its bin, as a share of what is wanted of the bin
    for number in range(_LENGTH_BINS):
        mine = np.flatnonzero(bins[order] == number)
        place[mine] = (np.arange(len(mine)) + 0.5) / max(wanted[number], 1e-9)
    spread = order[np.argsort(place, kind="stable")]
    if budget.num_tokens is None:
        budget = replace(budget, num_samples=int(wanted.sum()))
    rows = budget.first_of(spread, base.num_tokens)
    return setting.plan("random-length", rows, setting.extraction_cost, {"length_bins": _LENGTH_BINS})
