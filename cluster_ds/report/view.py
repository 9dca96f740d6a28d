"""A plan with its samples' texts and proxies, as a report looks at them. Shapes: N samples, n shown, H features."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.decomposition import PCA

from ..features import Points
from ..plan import Plan
from ..prepare import Prepared, cache_dir
from ..recipe import Recipe
from ..shards import read_proxies
from .terms import telling_terms

SHOWN_TOKENS = 400  # of an example
_SHOWN_SAMPLES = 4_000  # in a figure
_NAMING_SAMPLES = 50  # of each cluster, at least
_HOVER_TOKENS = 160


@dataclass(frozen=True)
class View:
    """What the report is made of.

    Attributes:
        recipe: of the run.
        prepared: tokens, plan, and seconds of the stages.
        output_dir: the run's folder.
        world_size: W that training is looked at for.
    """

    recipe: Recipe
    prepared: Prepared
    output_dir: Path
    world_size: int

    @property
    def plan(self) -> Plan:
        """What was kept."""
        return self.prepared.plan

    @property
    def manifest(self) -> dict[str, Any]:
        """The plan's."""
        return self.plan.manifest

    @cached_property
    def clustered(self) -> np.ndarray:
        """Int64, the samples that are in a cluster."""
        return np.flatnonzero(self.plan.cluster >= 0)

    @cached_property
    def shown(self) -> np.ndarray:
        """Int64, the samples in the figures of single samples."""
        drawn = np.random.default_rng((self.manifest["selection"]["seed"], 11)).permutation(self.clustered)
        return np.sort(drawn[:_SHOWN_SAMPLES])

    @cached_property
    def opening(self) -> str:
        """What the template puts before every sample."""
        rows = self.shown[np.linspace(0, len(self.shown) - 1, min(50, len(self.shown))).astype(int)]
        return os.path.commonprefix([self._decode(row, _HOVER_TOKENS) for row in rows]) if len(rows) > 1 else ""

    def text(self, row: int, num_tokens: int = _HOVER_TOKENS) -> str:
        """The beginning of a sample, without the template's opening."""
        return self._decode(row, num_tokens).removeprefix(self.opening)

    def _decode(self, row: int, num_tokens: int) -> str:
        start, end = self.prepared.tokens.offsets[row : row + 2]
        ids = self.prepared.tokens.input_ids[start : min(end, start + num_tokens)]
        return self.prepared.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)

    @cached_property
    def titles(self) -> list[str]:
        """A name of every cluster from its most telling terms; of small clusters more samples are read than are shown."""
        clusters = self.plan.cluster
        few = [np.flatnonzero(clusters == c)[:_NAMING_SAMPLES] for c in range(self.plan.num_clusters)]
        rows = np.unique(np.concatenate([self.shown, *few]))
        terms = telling_terms([self.text(row, SHOWN_TOKENS) for row in rows], clusters[rows], self.plan.num_clusters)
        return [f"{c}: {', '.join(found)}" if found else str(c) for c, found in enumerate(terms)]

    @cached_property
    def plane(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The shown samples' unit proxies on two principal components [n, 2], and the components' shares of the variance.

        None where the proxies are not in the cache any more.
        """
        key, tokens = str(self.manifest["provenance"].get("proxies")), self.prepared.tokens
        folder = cache_dir(self.recipe, self.output_dir) / "proxies" / key
        try:
            features = read_proxies(folder, tokens, self.recipe.selection.tokens_per_batch, key).features
        except (ValueError, OSError):
            return None
        place = np.empty(len(tokens), dtype=np.int64)
        place[features.rows] = np.arange(len(tokens))
        places = place[self.shown]
        order = np.argsort(places)
        vectors = np.empty((len(places), features.dim), dtype=np.float32)
        vectors[order] = Points(features, places[order]).take(slice(None)).float().numpy()
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
        if min(vectors.shape) < 2:
            return None
        pca = PCA(2, random_state=0)
        return pca.fit_transform(vectors), np.nan_to_num(pca.explained_variance_ratio_)
