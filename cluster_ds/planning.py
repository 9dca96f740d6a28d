"""Stages 4 to 6 in order: features -> clusters -> selection -> plan. Knows no model, no process group, no DeepSpeed.

Vectors are never gathered: they stay in the array or the shards they come from (see `features`) and are read block by block.
Shapes: N samples, n of them with a proxy that is not zero, H features, K clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from .calibration import bytes_needed, calibrate
from .clustering import Clusters, cluster, require_finite, require_memory, seconds_needed
from .duplicates import Duplicates, near_duplicates
from .features import Features, Points, as_features, one_thread_a_block
from .files import size_text
from .plan import Plan
from .selection import PlanSettings, Selection, cluster_weights, pool_of, select
from .variance import Moments, batch_variances, cluster_sums, effective_sample_size, selection_bias

_OF_CLUSTERING = ("num_clusters", "alpha", "min_fraction", "seed", "num_restarts", "normalize")
_EXTREME_ROWS = 50
_SHOWN_PAIRS = 50


def make_plan(
    features: np.ndarray | Features, ids: Sequence[str], lengths: Sequence[int] | np.ndarray, *,
    num_supervised_tokens: Sequence[int] | np.ndarray | None = None, losses: np.ndarray | None = None,
    norms: np.ndarray | None = None, sources: Sequence[str] | None = None, provenance: dict[str, Any] | None = None,
    device: torch.device | None = None, report: Callable[[str], None] | None = None, **settings: Any,
) -> Plan:
    """Cluster any features, keep a part of every cluster, weight it.

    Args:
        features: float [N, H], e.g. gradient proxies; row i belongs to ids[i] and dataset[i]. Zero vectors are excluded.
        ids: N unique sample ids.
        lengths: tokens of each sample.
        num_supervised_tokens: labels that the model is asked to predict in each sample; lengths - 1 by default.
        losses: float [N], mean token loss of each sample before training, kept in the plan.
        norms: float [N], lengths of the proxies before normalisation, for features that are unit vectors already; only with
            normalize.
        sources: N names of a mixture's sources, kept in the plan and counted per cluster.
        provenance: hashes that `Plan.differences` compares later.
        device: where blocks of features are computed; the CPU by default.
        report: called with lines about what is about to be done.
        settings: see `PlanSettings`.

    Raises:
        ValueError: for shapes that do not fit, repeated ids, features that are not finite, and what the stages refuse.
    """
    wanted = PlanSettings(**settings)
    say = report or (lambda line: None)
    clustered = cluster_features(
        features, ids, lengths, wanted, num_supervised_tokens=num_supervised_tokens, losses=losses, norms=norms,
        sources=sources, provenance=provenance, device=device, report=report,
    )
    return plan_from(clustered, wanted, say)


@dataclass(frozen=True)
class Clustered:
    """Samples in clusters, from which plans of different selections can be made.

    Attributes:
        settings: that the clusters were made with.
        ids, lengths, supervised, losses, sources: of all N samples.
        provenance: for the manifest.
        rows: int64 [n], the samples with a proxy that is not zero; what follows is in their order.
        ranks: int64 [N], the place of each sample's id among all, sorted.
        points, unit: the vectors that were clustered, and those divided by their lengths.
        magnitudes: float64 [n], the lengths of the proxies.
        clusters: of the points.
    """

    settings: PlanSettings
    ids: list[str]
    lengths: np.ndarray
    supervised: np.ndarray
    losses: np.ndarray
    sources: list[str]
    provenance: dict[str, Any]
    rows: np.ndarray
    ranks: np.ndarray
    points: Points
    unit: Points
    magnitudes: np.ndarray
    clusters: Clusters

    def column(self, values: np.ndarray, fill: Any, dtype: Any) -> np.ndarray:
        """Values [n] of the clustered samples as a column [N] of all."""
        out = np.full(len(self.ids), fill, dtype=dtype)
        out[self.rows] = values
        return out


def cluster_features(
    features: np.ndarray | Features, ids: Sequence[str], lengths: Sequence[int] | np.ndarray, settings: PlanSettings, *,
    num_supervised_tokens: Sequence[int] | np.ndarray | None = None, losses: np.ndarray | None = None,
    norms: np.ndarray | None = None, sources: Sequence[str] | None = None, provenance: dict[str, Any] | None = None,
    device: torch.device | None = None, report: Callable[[str], None] | None = None,
) -> Clustered:
    """Cluster any features, for `plan_from`; arguments and errors as those of `make_plan`."""
    store = as_features(features)
    lengths = np.asarray(lengths, dtype=np.int64)
    supervised = np.asarray(lengths - 1 if num_supervised_tokens is None else num_supervised_tokens, dtype=np.int64)
    by_id = _require_rows(store, ids, lengths, supervised, {"losses": losses, "sources": sources, "norms": norms})
    if norms is not None:
        norms = np.asarray(norms, dtype=np.float64)
        if not settings.normalize or not (np.isfinite(norms) & (norms >= 0)).all():
            raise ValueError("norms must be finite and not negative, and go with normalize=True, which divides by them")
    ranks = np.empty(len(ids), dtype=np.int64)
    ranks[by_id] = np.arange(len(ids))
    # An array is summed in the order of its ids, so that its own order does not matter; shards as they lie on disk.
    rows, unit, magnitudes = _usable(store, ids, None if isinstance(features, Features) else by_id, device)
    points = unit if settings.normalize else replace(unit, scale=None)
    if norms is not None:
        magnitudes = norms[rows]

    calibrated = settings.weighting == "calibrated"
    besides = bytes_needed(len(points), points.dim, settings.num_clusters) if calibrated else 0
    needed = require_memory(
        len(points), points.dim, settings.num_clusters, settings.alpha, bool(store.projection), besides
    )
    if report is not None:
        seconds = seconds_needed(points, settings.num_clusters, settings.num_restarts)
        report(
            f"clustering {len(points)} x {points.dim} into {settings.num_clusters}: about {seconds:.0f} s and at most "
            f"{size_text(needed)} of memory"
        )
    clusters = cluster(
        points, settings.num_clusters, alpha=settings.alpha, min_fraction=settings.min_fraction, seed=settings.seed,
        num_restarts=settings.num_restarts, ids=ranks[rows],
    )
    return Clustered(
        settings, list(ids), lengths, supervised,
        np.asarray(np.full(len(ids), np.nan) if losses is None else losses, dtype=np.float32),
        list(sources) if sources is not None and len(set(sources)) > 1 else [], provenance or {}, rows, ranks, points, unit,
        magnitudes, clusters,
    )


def plan_from(clustered: Clustered, wanted: PlanSettings, say: Callable[[str], None]) -> Plan:
    """Keep a part of every cluster, and weight it.

    Args:
        clustered: of `cluster_features`.
        wanted: how to select; what it says of clustering must be what the clusters were made with.
        say: called with lines about what is about to be done.
    Raises:
        ValueError: for clusters of other settings, and what the stages refuse.
    """
    for name in _OF_CLUSTERING:
        then, now = getattr(clustered.settings, name), getattr(wanted, name)
        if then != now:
            raise ValueError(f"the clusters were made with {name} {then}, the plan is to have {now}: cluster again")
    rows, ranks, clusters = clustered.rows, clustered.ranks, clustered.clusters
    ids, lengths, supervised = clustered.ids, clustered.lengths, clustered.supervised
    with one_thread_a_block():
        statistics, selection, duplicates = _select(
            clustered.points, clustered.unit, clusters, clustered.magnitudes, ranks[rows], len(ids), wanted, say
        )
    column, redrawn = clustered.column, wanted.redraw == "epoch"
    labels = column(clusters.labels, -1, np.int32)
    manifest = {
        "provenance": clustered.provenance, "selection": asdict(wanted), "num_samples": len(ids),
        "num_clustered": len(rows), **statistics,
        "distance_length_correlation": _correlation(clusters.distances, supervised[rows]),
        "extreme_rows": _extreme_rows(clusters, selection, rows, ranks, ids, lengths, supervised, clustered.losses),
        "near_duplicates": _named(duplicates, rows, ids),
        "excluded": {
            "zero proxy": len(ids) - len(rows), "near-duplicate": int(duplicates.repeated.sum()) if wanted.dedup else 0,
        },
        "versions": {name: version(name) for name in ("numpy", "scikit-learn", "torch", "transformers", "deepspeed")},
    }
    return Plan(
        ids=ids, cluster=labels, stratum=labels.copy(), distance=column(clusters.distances, np.nan, np.float64),
        weight=column(selection.weights, 0.0, np.float64), kept=column(selection.kept, False, bool), num_tokens=lengths,
        num_supervised_tokens=supervised, loss=clustered.losses, manifest=manifest, source=clustered.sources,
        pool=column(selection.pool, False, bool) if redrawn else None, redraw_seed=wanted.seed if redrawn else None,
    )


def _usable(
    store: Features, ids: Sequence[str], order: np.ndarray | None, device: torch.device | None
) -> tuple[np.ndarray, Points, np.ndarray]:
    """The samples whose vector is not zero: their rows int64 [n], their unit vectors, and lengths float64 [n].

    Args:
        store: of all vectors.
        ids: of all samples, for the message.
        order: the places in the store in the order that is wanted; None for the store's.
        device: where blocks are computed.
    """
    positions = np.arange(len(store)) if order is None else order
    everything = Points(store, positions, device=torch.device("cpu") if device is None else device)
    with one_thread_a_block():
        lengths = everything.norms()
    rows = store.rows[positions]
    if not np.isfinite(lengths).all():
        in_rows = np.empty(len(rows))
        in_rows[rows] = lengths
        require_finite(in_rows, np.asarray(ids))
    usable = lengths != 0
    if not usable.any():
        raise ValueError(f"all {len(ids)} features are zero vectors")
    return rows[usable], replace(everything, positions=positions[usable], scale=1.0 / lengths[usable]), lengths[usable]


def _select(
    points: Points, unit: Points, clusters: Clusters, magnitudes: np.ndarray, ranks: np.ndarray, num_samples: int,
    wanted: PlanSettings, say: Callable[[str], None],
) -> tuple[dict[str, Any], Selection, Duplicates]:
    """The selection and what the manifest says of it; everything in the order of `points`."""
    labels, k = clusters.labels, len(clusters.centroids)
    by_id = np.argsort(ranks)
    duplicates = near_duplicates(unit, labels, by_id, wanted.near_duplicate_cosine, wanted.seed)
    counted = ~duplicates.repeated if wanted.dedup else np.ones(len(labels), dtype=bool)
    in_pool = pool_of(labels, clusters.distances, by_id, counted, wanted.trim)
    factors = magnitudes if wanted.normalize else np.ones(len(labels))
    squares = magnitudes**2

    sums = cluster_sums(points, labels, k, np.stack([counted * 1.0, counted * factors, in_pool * factors]))
    moments, pool = (
        Moments.of(total, np.bincount(labels[rows], minlength=k), np.bincount(labels, rows * squares, k))
        for total, rows in ((sums[1], counted), (sums[2], in_pool))
    )
    selection = select(labels, clusters.distances, ranks, wanted, spreads=np.sqrt(pool.variances), dropped=~counted,
                       num_samples=num_samples)
    bias = selection_bias(points, labels, selection.kept, selection.weights, counted, factors, squares)
    statistics: dict[str, Any] = {}
    if wanted.weighting == "calibrated":
        say(f"calibrating the weights of {int(selection.kept.sum())} samples: some hundreds of passes over them")
        means = sums[0] / moments.sizes[:, None]
        selection, statistics["calibration"] = _calibrated(points, labels, selection, means, moments.shares, wanted)
        before = bias.relative_shift
        bias = selection_bias(points, labels, selection.kept, selection.weights, counted, factors, squares)
        statistics["calibration"] |= {"shift_before": before, "shift_after": bias.relative_shift}
    weights = cluster_weights(moments.sizes, selection.counts) if wanted.weighting != "none" else np.ones(k)
    statistics |= {
        "num_kept": int(selection.kept.sum()), "sizes": moments.sizes.tolist(), "counts": selection.counts.tolist(),
        "weights": weights.tolist(), "effective_sample_size": effective_sample_size(selection.weights[selection.kept]),
        "cap": clusters.cap, "floor": clusters.floor, "num_moved": clusters.num_moved,
        "nearest_sizes": clusters.nearest_sizes.tolist(), "gap": clusters.gap, "inertia": clusters.inertia,
        "bias": {"relative_shift": bias.relative_shift, "cosines": bias.cosines.tolist()},
        "variance": {
            **batch_variances(moments, pool, int(selection.counts.sum())), "kept": bias.variance,
            "bias_squared": bias.squared, "inside": pool.variances.tolist(), "between": moments.between,
        },
    }
    return statistics, selection, duplicates


def _calibrated(
    points: Points, labels: np.ndarray, selection: Selection, means: np.ndarray, shares: np.ndarray, wanted: PlanSettings
) -> tuple[Selection, dict[str, Any]]:
    """Weights times those of the calibration."""
    mine = np.flatnonzero(selection.kept)
    scale = None if points.scale is None else points.scale[mine]
    kept = replace(points, positions=points.positions[mine], scale=scale)
    found = calibrate(kept, labels[mine], means, shares, wanted.min_effective)
    weights = selection.weights.copy()
    weights[mine] *= found.weights
    least = min(effective_sample_size(found.weights[labels[mine] == c]) for c in range(len(means)))
    facts = {
        "effective_sample_size": found.effective_sample_size, "least_of_a_cluster": least,
        "largest_weight": float(found.weights.max()),
        "ridge": found.ridge if np.isfinite(found.ridge) else None,
    }
    return replace(selection, weights=weights), facts


def _require_rows(
    store: Features, ids: Sequence[str], lengths: np.ndarray, supervised: np.ndarray, others: dict[str, Any]
) -> np.ndarray:
    """Refuse rows that do not belong together; returns int64 [N], the rows in the order of their ids."""
    if not (len(store) == len(ids) == len(lengths) == len(supervised)):
        raise ValueError(
            f"{len(store)} features, {len(ids)} ids, {len(lengths)} lengths and {len(supervised)} supervised counts"
        )
    if len(ids) == 0:
        raise ValueError("there are 0 samples: nothing to select from")
    if not all(isinstance(i, str) for i in ids):
        raise ValueError("sample ids must be text")
    names = np.asarray(ids)
    by_id = np.argsort(names, kind="stable")
    num_repeated = int((names[by_id][1:] == names[by_id][:-1]).sum())
    if num_repeated:
        raise ValueError(f"{num_repeated} of {len(ids)} sample ids repeat an earlier one: ids must be unique")
    if (supervised < 1).any():
        at = int(np.argmax(supervised < 1))
        raise ValueError(f"sample {ids[at]} has no supervised token: exclude such rows before making a plan")
    for name, values in others.items():
        if values is not None and len(values) != len(ids):
            raise ValueError(f"{len(values)} {name} for {len(ids)} samples")
    return by_id


def _extreme_rows(
    clusters: Clusters, selection: Selection, rows: np.ndarray, rank: np.ndarray, ids: Sequence[str], lengths: np.ndarray,
    supervised: np.ndarray, loss: np.ndarray,
) -> list[dict[str, Any]]:
    """The rows that lie farthest out, by distance over their cluster's root mean square: broken ones come first."""
    k = len(clusters.centroids)
    spreads = np.sqrt(np.bincount(clusters.labels, clusters.distances**2, k) / np.bincount(clusters.labels, minlength=k))
    times = clusters.distances / np.maximum(spreads[clusters.labels], 1e-12)
    order = np.lexsort((rank[rows], -times))[:_EXTREME_ROWS]
    return [
        {
            "id": ids[rows[i]], "cluster": int(clusters.labels[i]), "distance": float(clusters.distances[i]),
            "times_spread": float(times[i]), "kept": bool(selection.kept[i]), "num_tokens": int(lengths[rows[i]]),
            "num_supervised_tokens": int(supervised[rows[i]]),
            "loss": None if np.isnan(loss[rows[i]]) else float(loss[rows[i]]),
        }
        for i in order
    ]


def _named(duplicates: Duplicates, rows: np.ndarray, ids: Sequence[str]) -> dict[str, Any]:
    """For the manifest: numbers, and the closest pairs by their ids."""
    closest = np.argsort(-duplicates.cosines, kind="stable")[:_SHOWN_PAIRS]
    return {
        "min_cosine": duplicates.min_cosine, "num_repeated": int(duplicates.repeated.sum()),
        "num_groups": duplicates.num_groups,
        "closest": [[ids[rows[a]], ids[rows[b]], float(duplicates.cosines[i])] for i in closest
                    for a, b in [duplicates.pairs[i]]],
    }


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) > 0 and np.ptp(b) > 0 else 0.0
