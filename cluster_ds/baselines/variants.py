"""CluSTER and its variants, and uniform sampling: all of them plans from the same clusters.

`cluster` is the paper's: the farthest samples of whole clusters, equal quotas, cluster weights. Each variant changes what
its name says. `uniform` is the paper's baseline of Loshchilov and Hutter: the same number of every cluster, at random,
weight 1; every global batch holds equal parts of the clusters. Quotas and redrawing are ours and need the random choice.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from ..plan import Plan
from ..planning import plan_from
from ..selection import PlanSettings
from .setting import Budget, Setting, in_all, nearest_in_tokens

_PAPER: dict[str, Any] = {
    "choice": "peripheral", "balance": "whole", "quota": "equal", "weighting": "cluster", "redraw": "none", "trim": 0.0,
    "dedup": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "uniform": {"choice": "random", "weighting": "none"},
    "cluster": {},
    "cluster-core": {"choice": "core"},
    "cluster-random": {"choice": "random"},
    "cluster-random_first": {"balance": "random_first"},
    "cluster-noweight": {"weighting": "none"},
    "cluster-calibrated": {"weighting": "calibrated"},
    "cluster-proportional": {"choice": "random", "quota": "proportional"},
    "cluster-neyman": {"choice": "random", "quota": "neyman"},
    "cluster-redraw": {"choice": "random", "redraw": "epoch"},
    "cluster-neyman-redraw": {"choice": "random", "quota": "neyman", "redraw": "epoch"},
}


def select(setting: Setting, budget: Budget, seed: int, *, name: str) -> Plan:
    """The plan of a variant; `seed` has gone into the clusters already.

    Raises:
        ValueError: if the clusters cannot give the budget, with the remedies.
    """
    number = budget.num_samples if budget.num_tokens is None else _size_for(setting, name, budget.num_tokens)
    started = time.perf_counter()
    plan = _planned(setting, settings_of(setting, name, number))
    cost = setting.extraction_cost
    cost = replace(cost, seconds=in_all(cost.seconds, time.perf_counter() - started))
    plan.manifest["selection"]["arm"] = name
    plan.manifest["cost"] = asdict(cost)
    return plan


def paper_settings(settings: PlanSettings) -> PlanSettings:
    """A recipe's clustering and budget with the paper's selection."""
    return replace(settings, **_PAPER)


def settings_of(setting: Setting, name: str, num_samples: int) -> PlanSettings:
    """The paper's selection of so many samples, changed by what the variant's name says."""
    assert setting.clustered is not None
    budget = {"ratio": None, "keep": num_samples / len(setting.base)}
    return replace(setting.clustered.settings, **{**_PAPER, **VARIANTS[name], **budget})


def _planned(setting: Setting, settings: PlanSettings) -> Plan:
    assert setting.clustered is not None
    return plan_from(setting.clustered, settings, lambda line: None)


def _size_for(setting: Setting, name: str, num_tokens: int) -> int:
    """The number of samples whose tokens come nearest to a number of them; weights do not matter for that."""
    least = setting.base.num_clusters

    def make(number: int) -> tuple[int, int] | None:
        try:
            plan = _planned(setting, replace(settings_of(setting, name, number), weighting="none"))
        except ValueError:  # more than the smallest cluster gives
            if number == least:
                raise
            return None
        return number, int(plan.num_tokens[plan.kept].sum())

    return nearest_in_tokens(make, lambda made: made[1], least, len(setting.usable), num_tokens)[0]
