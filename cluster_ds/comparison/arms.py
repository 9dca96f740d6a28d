"""The systems that can be compared, by name. Each plan is made on rank 0; some need scores first, which all ranks make."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..baselines import full, ifd, less, random_sample, s2l, variants
from ..baselines.setting import Budget, Setting
from ..plan import Plan

REFERENCE, OURS = "random", "cluster"

ARMS: dict[str, Callable[[Setting, Budget, int], Plan]] = {
    "full": full.select,
    "random": random_sample.select,
    "random-redraw": random_sample.select_redrawn,
    "random-length": random_sample.select_of_lengths,
    "ifd": ifd.select,
    "less": less.select,
    "s2l": s2l.select,
    **{name: partial(variants.select, name=name) for name in variants.VARIANTS},
}
SCORES: dict[str, Callable[[Setting], None]] = {"ifd": ifd.score, "less": less.score, "s2l": s2l.score}  # collective


def arms_of(text: str) -> list[str]:
    """The arms of a command line, e.g. "random,cluster" or "all".

    Raises:
        ValueError: naming the ones there are.
    """
    names = list(ARMS) if text == "all" else list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise ValueError(f"--arms: there is no {', '.join(unknown)}; there are {', '.join(ARMS)}, or all")
    return names
