"""A run's folder, opened for analysis, and where an analysis leaves numbers and pictures. Shapes: N samples, H hidden."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..distributed import Ranks
from ..files import write_json
from ..plan import Plan
from ..prepare import Samples, prepare_samples
from ..recipe import Recipe
from ..recipe_file import load_recipe
from ..shards import Proxies, read_proxies


@dataclass(frozen=True)
class Output:
    """A folder whose `analysis/` gets numbers and pictures."""

    folder: Path

    def save(self, name: str, numbers: dict[str, Any]) -> Path:
        """Write an analysis's numbers; returns the file."""
        path = self.folder / "analysis" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        write_json(path, numbers)
        return path

    @contextmanager
    def picture(self, name: str, width: float = 7, height: float = 4) -> Iterator[Any]:
        """A matplotlib figure, written as SVG when the caller is done with it; the same file from the same numbers."""
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        path = self.folder / "analysis" / f"{name}.svg"
        path.parent.mkdir(exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "cluster-ds"}):
            FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


@dataclass(frozen=True)
class Run(Output):
    """A finished selection.

    Attributes:
        recipe: as it was resolved.
        plan: what was kept.
        ranks: this process.
    """

    recipe: Recipe
    plan: Plan
    ranks: Ranks

    @cached_property
    def samples(self) -> Samples:
        """Tokens and model."""
        samples = prepare_samples(self.recipe, self.folder, self.ranks)
        if samples.provenance != self.plan.manifest["provenance"]:
            raise ValueError(
                f"{self.folder} was made from other data or another model than its recipe finds now: "
                + "; ".join(self.plan.differences(samples.provenance, self.plan.manifest["selection"]))
            )
        return samples

    @cached_property
    def proxies(self) -> Proxies:
        """What extraction left."""
        tokens_per_batch = self.recipe.selection.tokens_per_batch
        folder, key = self.samples.proxies_folder, self.plan.manifest["provenance"]["proxies"]
        return read_proxies(folder, self.samples.tokens, tokens_per_batch, key)

    @cached_property
    def unit(self) -> np.ndarray:
        """Float32 [N, H], the proxies as unit vectors (zero where the proxy is zero); in memory."""
        features = self.proxies.features
        unit = np.concatenate(features.parts)[np.argsort(features.rows)].astype(np.float32)
        return unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-30)

    @cached_property
    def usable(self) -> np.ndarray:
        """Int64, the rows that are in a cluster."""
        return np.flatnonzero(self.plan.cluster >= 0)


def read_run(folder: Path) -> Run:
    """A run's folder.

    Raises:
        ValueError: if it holds no plan or no recipe.
    """
    folder = folder.expanduser().resolve()
    if not (folder / "recipe.yaml").is_file():
        raise ValueError(f"{folder} holds no recipe.yaml: name the folder of a run that has begun to train")
    return Run(folder, load_recipe(str(folder / "recipe.yaml")), Plan.read(folder / "plan"), Ranks(0, 1, 0))
