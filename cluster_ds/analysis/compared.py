"""Tables 1, 4 and 14 and Figure 5, from a comparison: what selections cost, and how sensitive arms are to a setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..comparison.running import RESULTS
from ..comparison.tables import differences
from ..run_log import read_lines
from .runs import Output

_COUNTED = ("forwards", "backwards", "small_forwards", "small_backwards", "seconds")


def results_of(folder: Path) -> list[dict[str, Any]]:
    """The finished runs of a comparison.

    Raises:
        ValueError: if there are none.
    """
    entries = [e for e in read_lines(folder / RESULTS) if e["arm"] != "untrained"]
    if not entries:
        raise ValueError(f"{folder} holds no finished comparison ({RESULTS}): see launch/compare.py")
    return entries


def analyse_cost(run: Output) -> dict[str, Any]:
    """Passes and seconds of each arm's selection, the mean over its runs."""
    entries = results_of(run.folder)
    arms: dict[str, dict[str, float]] = {}
    for arm in dict.fromkeys(e["arm"] for e in entries):
        mine = [e for e in entries if e["arm"] == arm]
        arms[arm] = {name: float(np.mean([e["cost"][name] for e in mine])) for name in _COUNTED}
        arms[arm]["training_seconds"] = float(np.mean([e["training_seconds"] for e in mine]))
    ours = arms.get("cluster", {}).get("seconds")
    numbers = {"arms": arms, "seconds_over_cluster": {a: c["seconds"] / ours for a, c in arms.items()} if ours else None}
    run.save("cost", numbers)
    with run.picture("cost") as figure:
        axes = figure.subplots()
        named = [arm for arm, cost in arms.items() if cost["seconds"] > 0]
        axes.barh(named, [arms[arm]["seconds"] for arm in named])
        axes.set(xlabel="seconds of the selection", xscale="log")
        axes.invert_yaxis()
    return numbers


def analyse_sensitivity(run: Output) -> dict[str, Any]:
    """Test losses of every arm at every point of a comparison's sweep, and the differences from random.

    Raises:
        ValueError: if nothing was swept.
    """
    entries = results_of(run.folder)
    points = list(dict.fromkeys(e["point"] for e in entries))
    if len(points) < 2:
        raise ValueError(f"{run.folder} has one point: sweep, e.g. launch/compare.py --sweep selection.ratio=1,.75,.5")
    curves: dict[str, list[dict[str, Any]]] = {}
    for point in points:
        here = [e for e in entries if e["point"] == point]
        found = differences(here)
        for arm in dict.fromkeys(e["arm"] for e in here):
            losses = [e["test"]["sample_mean"] for e in here if e["arm"] == arm]
            d = found.get(arm)
            curves.setdefault(arm, []).append({
                "point": point, "test_loss": float(np.mean(losses)), "num_seeds": len(losses),
                "std": float(np.std(losses, ddof=1)) if len(losses) > 1 else None,
                "minus_random": None if d is None else [d.low, d.mean, d.high],
                "verdict": None if d is None else d.verdict,
            })
    numbers = {"points": points, "arms": curves}
    run.save("sensitivity", numbers)
    with run.picture("sensitivity") as figure:
        axes = figure.subplots()
        for arm, curve in curves.items():
            x = [points.index(entry["point"]) for entry in curve]
            axes.errorbar(x, [e["test_loss"] for e in curve], yerr=[e["std"] or 0 for e in curve], label=arm, capsize=2)
        axes.set_xticks(range(len(points)), points, fontsize=8)
        axes.set(ylabel="test loss")
        axes.legend(fontsize=8)
    return numbers
