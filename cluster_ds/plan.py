"""Stage 6: the plan: an inspectable table of all samples and a manifest that binds it to data, template and model.

The plan does not know the number of ranks. On disk it is a folder with `table.parquet` and `manifest.json`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .clustering import cluster
from .files import MANIFEST, commit_folder, hash_files, read_json
from .selection import cluster_weights, select, selection_bias

FORMAT = 2
TABLE = "table.parquet"
COLUMNS = {
    "sample_id": pa.string(),
    "cluster": pa.int32(),  # -1: zero proxy, in no cluster
    "stratum": pa.int32(),  # global batches draw from each stratum in proportion to its kept count
    "distance": pa.float64(),
    "weight": pa.float64(),
    "kept": pa.bool_(),
    "num_tokens": pa.int64(),
    "num_supervised_tokens": pa.int64(),
    "loss": pa.float32(),  # mean token loss before training; NaN where unknown
    "source": pa.string(),  # where the row comes from, in a mixture
}
_MIN_COSINE = 0.99
_BLOCK = 4096  # rows converted to float64 at a time


@dataclass(frozen=True)
class Plan:
    """N samples in the order of the data set; row i belongs to `dataset[i]`.

    Attributes:
        ids: N sample ids, unique.
        cluster, stratum: int32 [N].
        distance, weight: float64 [N].
        kept: bool [N].
        num_tokens, num_supervised_tokens: int64 [N].
        loss: float32 [N].
        source: N names; empty when there is one source.
        manifest: provenance, settings and statistics.
    """

    ids: list[str]
    cluster: np.ndarray
    stratum: np.ndarray
    distance: np.ndarray
    weight: np.ndarray
    kept: np.ndarray
    num_tokens: np.ndarray
    num_supervised_tokens: np.ndarray
    loss: np.ndarray
    source: list[str] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """N."""
        return len(self.ids)

    @property
    def num_clusters(self) -> int:
        """K."""
        return int(self.cluster.max()) + 1

    @property
    def hash(self) -> str:
        """Hash of everything that training depends on; ranks and resumed runs must agree on it."""
        digest = hashlib.blake2b("\n".join(self.ids).encode(), digest_size=16)
        for column in (self.cluster, self.stratum, self.weight, self.kept, self.num_tokens, self.num_supervised_tokens):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()

    def write(self, folder: Path) -> None:
        """Replace `folder` by this plan in one step."""
        columns = [self.ids, self.cluster, self.stratum, self.distance, self.weight, self.kept,
                   self.num_tokens, self.num_supervised_tokens, self.loss, self.source or pa.nulls(len(self), pa.string())]
        arrays = [pa.array(c, type=t) for c, t in zip(columns, COLUMNS.values(), strict=True)]
        manifest = {**self.manifest, "format": FORMAT, "plan_hash": self.hash}
        with commit_folder(folder, manifest, replace=True) as part:
            pq.write_table(pa.Table.from_arrays(arrays, names=list(COLUMNS)), part / TABLE)
            manifest["table_hash"] = hash_files([part / TABLE])

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Open and verify a plan.

        Raises:
            ValueError: if it is missing, damaged, or of another format.
        """
        remedy = f"delete {folder} and run launch/preprocess.py again"
        if not (folder / MANIFEST).is_file():
            raise ValueError(f"no plan at {folder}: run launch/preprocess.py first")
        try:
            manifest = read_json(folder / MANIFEST)
            manifest["table_hash"], manifest["plan_hash"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"plan {folder} is damaged: {MANIFEST} is not readable: {remedy}") from None
        if manifest.get("format") != FORMAT:
            raise ValueError(f"plan {folder} has format {manifest.get('format')}, this version reads {FORMAT}: {remedy}")
        if not (folder / TABLE).is_file() or hash_files([folder / TABLE]) != manifest["table_hash"]:
            raise ValueError(f"plan {folder} is damaged: {TABLE} does not have the hash of its manifest: {remedy}")
        table = pq.read_table(folder / TABLE)
        arrays = {name: table.column(name).to_numpy() for name in list(COLUMNS)[1:-1]}
        source = [] if table.column("source").null_count else table.column("source").to_pylist()
        plan = cls(table.column("sample_id").to_pylist(), source=source, manifest=manifest, **arrays)
        if plan.hash != manifest["plan_hash"]:
            raise ValueError(f"plan {folder}: hash {plan.hash} instead of {manifest['plan_hash']}: {remedy}")
        return plan

    def differences(self, provenance: dict[str, Any], selection: dict[str, Any]) -> list[str]:
        """What was different when this plan was made, one line each; empty if it still holds."""
        out = []
        for part, now in (("provenance", provenance), ("selection", selection)):
            then = self.manifest.get(part, {})
            for key in sorted(set(then) | set(now)):
                if then.get(key) != now.get(key):
                    out.append(f"{key}: plan {then.get(key)!r}, now {now.get(key)!r}")
        return out

    def lines(self) -> list[str]:
        """What was found and kept, one line each."""
        m = self.manifest
        sizes, weights = np.array(m["sizes"]), np.array(m["weights"])
        at_cap = f"; {m['num_moved']} moved by the bounds [{m['floor']}, {m['cap']}]" if m["num_moved"] else ""
        kept = int(self.kept.sum())
        tokens = self.num_supervised_tokens
        lines = [
            f"{m['num_clustered']} samples in {len(sizes)} clusters, sizes {sizes.tolist()}{at_cap}; "
            f"certified gap {max(m['gap'], 0.0):.1e}",
            f"kept {kept} ({kept / m['num_clustered']:.1%}), {m['quota']} of each cluster, "
            f"{tokens[self.kept].sum() / tokens.sum():.1%} of the supervised tokens",
            f"weights {np.round(weights, 3).tolist()}, effective sample size {m['effective_sample_size']:.3f}",
        ]
        for name in sorted(set(self.source)):
            mine = np.array([source == name for source in self.source])
            counts = [f"{int((mine & (self.cluster == c) & self.kept).sum())}/{int((mine & (self.cluster == c)).sum())}"
                      for c in range(len(sizes))]
            kept_here = int((mine & self.kept).sum())
            lines.append(f"source {name}: kept {kept_here} of {int(mine.sum())}; by cluster {', '.join(counts)}")
        if "bias" in m:
            lines.append(
                f"mean proxy of what is trained is off by {m['bias']['relative_shift']:.3f} of the full mean; "
                f"cosine of cluster means {min(m['bias']['cosines']):.4f} or more; correlation of distance with "
                f"length {m['distance_length_correlation']:+.2f}"
            )
            if min(m["bias"]["cosines"]) < _MIN_COSINE:
                lines.append(
                    f"warning: a kept part's mean has cosine {min(m['bias']['cosines']):.4f} to its whole cluster's, "
                    f"under {_MIN_COSINE}: selection.choice random has no such bias"
                )
        for kind, count in m["excluded"].items():
            if count:
                lines.append(f"{count} samples excluded: {kind}")
        return lines


def make_plan(
    features: np.ndarray, ids: Sequence[str], lengths: np.ndarray, *, num_clusters: int = 4, ratio: float | None = None,
    keep: float | None = None, alpha: float = 1.5, min_fraction: float = 0.0, choice: str = "peripheral",
    balance: str = "whole", weighting: str = "cluster", seed: int = 0, num_restarts: int = 20, normalize: bool = True,
    num_supervised_tokens: np.ndarray | None = None, losses: np.ndarray | None = None,
    sources: Sequence[str] | None = None, provenance: dict[str, Any] | None = None,
) -> Plan:
    """Cluster any features, keep equal parts, weight them.

    Args:
        features: float [N, H], e.g. gradient proxies; row i belongs to ids[i] and dataset[i].
        ids: N unique sample ids; the plan does not depend on the rows' order, only on (id, feature) pairs.
        lengths: int [N], tokens of each sample.
        num_clusters, alpha, min_fraction, num_restarts: see `clustering.cluster`.
        ratio, keep, choice, balance, weighting: see `selection.select`.
        seed: of the search and of random choices.
        normalize: scale features to unit l2 norm, as CluSTER does.
        num_supervised_tokens: int [N], labels in the loss; lengths - 1 by default. The token mean divides by them.
        losses: float [N], mean token loss of each sample before training, for the record.
        sources: N names of a mixture's sources, kept in the plan and counted per cluster.
        provenance: hashes that `Plan.differences` compares later.

    Raises:
        ValueError: for shapes that do not fit, repeated ids, features that are not finite, and what the stages refuse.
    """
    features, lengths = np.asarray(features), np.asarray(lengths, dtype=np.int64)
    supervised = np.asarray(lengths - 1 if num_supervised_tokens is None else num_supervised_tokens, dtype=np.int64)
    if not (len(features) == len(ids) == len(lengths) == len(supervised)):
        raise ValueError(
            f"{len(features)} features, {len(ids)} ids, {len(lengths)} lengths and {len(supervised)} supervised counts"
        )
    if len(set(ids)) != len(ids):
        raise ValueError(f"{len(ids) - len(set(ids))} of {len(ids)} sample ids repeat an earlier one: ids must be unique")
    if (supervised < 1).any():
        at = int(np.argmax(supervised < 1))
        raise ValueError(f"sample {ids[at]} has no supervised token: exclude such rows before making a plan")
    if not all(isinstance(i, str) for i in ids):
        raise ValueError("sample ids must be text")
    for name, values in (("losses", losses), ("sources", sources)):
        if values is not None and len(values) != len(ids):
            raise ValueError(f"{len(values)} {name} for {len(ids)} samples")
    if num_clusters < 1:
        raise ValueError(f"num_clusters is {num_clusters}: at least 1")
    if not np.issubdtype(features.dtype, np.floating):
        features = features.astype(np.float32)
    norms = np.concatenate([_norms(features[i : i + _BLOCK]) for i in range(0, len(features), _BLOCK)])
    usable = np.flatnonzero(norms != 0)  # NaN passes here and is named by the clustering
    if len(usable) == 0:
        raise ValueError(f"all {len(ids)} features are zero vectors")
    names = np.asarray(ids)[usable]
    points = features[usable]
    for start in range(0, len(points), _BLOCK) if normalize else ():
        points[start : start + _BLOCK] /= norms[usable[start : start + _BLOCK], None]
    clusters = cluster(points, num_clusters, alpha=alpha, min_fraction=min_fraction, seed=seed,
                       num_restarts=num_restarts, ids=names)
    selection = select(clusters.labels, clusters.distances, names, choice=choice, balance=balance, ratio=ratio,
                       keep=keep, weighting=weighting, seed=seed)

    def spread(values: np.ndarray, fill: Any, dtype: Any) -> np.ndarray:
        out = np.full(len(ids), fill, dtype=dtype)
        out[usable] = values
        return out

    shift, cosines = selection_bias(points, selection, clusters.labels)
    kept_weights = selection.weights[selection.kept]
    labels = spread(clusters.labels, -1, np.int32)
    manifest = {
        "provenance": provenance or {},
        "selection": {
            "num_clusters": num_clusters, "alpha": alpha, "min_fraction": min_fraction, "choice": choice,
            "balance": balance, "ratio": ratio, "keep": keep, "weighting": weighting, "seed": seed,
            "num_restarts": num_restarts, "normalize": normalize,
        },
        "num_samples": len(ids), "num_clustered": len(usable), "num_kept": int(selection.kept.sum()),
        "sizes": clusters.sizes.tolist(), "quota": selection.quota,
        "weights": (cluster_weights(clusters.sizes) if weighting == "cluster" else np.ones(len(clusters.sizes))).tolist(),
        "effective_sample_size": float(kept_weights.sum() ** 2 / (kept_weights**2).sum() / len(kept_weights)),
        "cap": clusters.cap, "floor": clusters.floor, "num_moved": clusters.num_moved, "gap": clusters.gap,
        "inertia": clusters.inertia, "bias": {"relative_shift": shift, "cosines": cosines.tolist()},
        "distance_length_correlation": _correlation(clusters.distances, supervised[usable]),
        "excluded": {"zero proxy": len(ids) - len(usable)},
        "versions": {name: version(name) for name in ("numpy", "scikit-learn", "torch", "transformers", "deepspeed")},
    }
    return Plan(
        ids=list(ids), cluster=labels, stratum=labels.copy(),
        distance=spread(clusters.distances, np.nan, np.float64), weight=spread(selection.weights, 0.0, np.float64),
        kept=spread(selection.kept, False, bool), num_tokens=lengths, num_supervised_tokens=supervised,
        loss=np.asarray(np.full(len(ids), np.nan) if losses is None else losses, dtype=np.float32),
        source=list(sources) if sources is not None and len(set(sources)) > 1 else [], manifest=manifest,
    )


def _norms(block: np.ndarray) -> np.ndarray:
    return np.linalg.norm(block.astype(np.float64), axis=1)


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) > 0 and np.ptp(b) > 0 else 0.0
