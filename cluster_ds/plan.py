"""Stage 6: the plan: an inspectable table of all samples and a manifest that binds it to data, template and model.

The plan does not know the number of ranks. On disk it is a folder with `table.parquet` and `manifest.json`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .files import MANIFEST, commit_folder, hash_files, read_json
from .selection import draw

FORMAT = 4
TABLE = "table.parquet"
COLUMNS = {
    "sample_id": pa.string(),
    "cluster": pa.int32(),  # -1: zero proxy, in no cluster
    "stratum": pa.int32(),  # global batches draw from each stratum in proportion to its kept count
    "distance": pa.float64(),
    "weight": pa.float64(),
    "kept": pa.bool_(),
    "pool": pa.bool_(),  # may be kept in an epoch, where every epoch draws its own samples; else the same as kept
    "num_tokens": pa.int64(),
    "num_supervised_tokens": pa.int64(),
    "loss": pa.float32(),  # mean token loss before training; NaN where unknown
    "source": pa.string(),  # where the row comes from, in a mixture
}
_MIN_COSINE = 0.99
_NO_BIAS = 1e-9  # of the variance: batches of a billion samples


@dataclass(frozen=True)
class Plan:
    """N samples in the order of the data set; row i belongs to `dataset[i]`.

    Attributes:
        ids: N sample ids, unique.
        cluster, stratum: int32 [N].
        distance, weight: float64 [N].
        kept: bool [N]; in the first epoch, where every epoch draws its own.
        num_tokens, num_supervised_tokens: int64 [N].
        loss: float32 [N].
        source: N names; empty when there is one source.
        manifest: provenance, settings and statistics.
        pool: bool [N], what an epoch's samples are drawn from; None for `kept`.
        redraw_seed: of the draws; None if every epoch sees the same samples.
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
    pool: np.ndarray | None = None
    redraw_seed: int | None = None

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
        if self.redraw_seed is not None:
            digest.update(f"{self.redraw_seed}".encode() + np.packbits(self._pool).tobytes())
        return digest.hexdigest()

    @property
    def _pool(self) -> np.ndarray:
        return self.kept if self.pool is None else self.pool

    @cached_property
    def _by_id(self) -> np.ndarray:
        return np.argsort(np.asarray(self.ids), kind="stable")

    def kept_in(self, epoch: int) -> np.ndarray:
        """Bool [N], an epoch's samples: a pure function of plan and epoch, equal in number for each stratum."""
        if self.redraw_seed is None or epoch == 0:
            return self.kept
        counts = np.bincount(self.stratum[self.kept])
        return draw(self.stratum, self._by_id, self._pool, counts, self.redraw_seed, epoch)

    def write(self, folder: Path) -> None:
        """Replace `folder` by this plan in one step."""
        columns = [self.ids, self.cluster, self.stratum, self.distance, self.weight, self.kept,
                   self._pool, self.num_tokens, self.num_supervised_tokens, self.loss,
                   self.source or pa.nulls(len(self), pa.string())]
        arrays = [pa.array(c, type=t) for c, t in zip(columns, COLUMNS.values(), strict=True)]
        manifest = {**self.manifest, "format": FORMAT, "plan_hash": self.hash, "redraw_seed": self.redraw_seed}
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
        plan = cls(
            table.column("sample_id").to_pylist(), source=source, manifest=manifest, redraw_seed=manifest["redraw_seed"],
            **arrays,
        )
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
        sizes, counts, weights = np.array(m["sizes"]), np.array(m["counts"]), np.array(m["weights"])
        at_cap = f"; {m['num_moved']} moved by the bounds [{m['floor']}, {m['cap']}]" if m["num_moved"] else ""
        kept = int(self.kept.sum())
        tokens = self.num_supervised_tokens
        again = "" if self.redraw_seed is None else f", drawn anew each epoch from {int(self._pool.sum())}"
        counted = int(sizes.sum())  # without near-duplicates that were left out
        lines = [
            f"{counted} samples in {len(sizes)} clusters, sizes {sizes.tolist()}{at_cap}; "
            f"certified gap {max(m['gap'], 0.0):.1e}",
            f"kept {kept} ({kept / len(self):.1%}), {counts_text(counts)}, "
            f"{tokens[self.kept].sum() / tokens.sum():.1%} of the supervised tokens{again}",
            f"weights {np.round(weights, 3).tolist()}, effective sample size {m['effective_sample_size']:.3f}",
        ]
        if "calibration" in m:
            c = m["calibration"]
            lines.append(
                f"calibrated: the shift of the mean proxy falls from {c['shift_before']:.3f} to {c['shift_after']:.3f}; "
                f"effective sample size of the calibration {c['effective_sample_size']:.3f}, largest weight "
                f"{c['largest_weight']:.2f} of its cluster's mean"
            )
        for name in sorted(set(self.source)):
            mine = np.array([source == name for source in self.source])
            parts = [f"{int((mine & (self.cluster == c) & self.kept).sum())}/{int((mine & (self.cluster == c)).sum())}"
                      for c in range(len(sizes))]
            kept_here = int((mine & self.kept).sum())
            lines.append(f"source {name}: kept {kept_here} of {int(mine.sum())}; by cluster {', '.join(parts)}")
        if "bias" in m:
            first = "" if self.redraw_seed is None else " in the first epoch"
            lines.append(
                f"mean proxy of what is trained{first} is off by {m['bias']['relative_shift']:.3f} of the full mean; "
                f"cosine of cluster means {min(m['bias']['cosines']):.4f} or more; correlation of distance with "
                f"length {m['distance_length_correlation']:+.2f}"
            )
            if min(m["bias"]["cosines"]) < _MIN_COSINE:
                lines.append(
                    f"warning: a kept part's mean has cosine {min(m['bias']['cosines']):.4f} to its whole cluster's, "
                    f"under {_MIN_COSINE}: selection.choice random has no such bias"
                )
        if "variance" in m:
            lines += _variance_lines(m["variance"])
        if m.get("near_duplicates", {}).get("num_repeated"):
            d = m["near_duplicates"]
            what = "left out" if m["selection"]["dedup"] else "kept (selection.dedup leaves them out)"
            lines.append(
                f"near-duplicates: {d['num_repeated']} samples repeat an earlier one of their cluster (cosine of proxies "
                f"{d['min_cosine']:g} or more, of {d['num_groups']} others): {what}"
            )
        if m.get("extreme_rows"):
            first = ", ".join(f"{row['id']} ({row['times_spread']:.2f})" for row in m["extreme_rows"][:3])
            lines.append(
                f"the {len(m['extreme_rows'])} most extreme rows stand in {MANIFEST}; by distance over their cluster's "
                f"root mean square: {first}, ..."
            )
        for kind, count in m["excluded"].items():
            if count:
                lines.append(f"{count} samples excluded: {kind}")
        return lines


def counts_text(counts: np.ndarray) -> str:
    """E.g. "92 of each cluster"."""
    return f"{counts[0]} of each cluster" if len(set(counts)) == 1 else f"{counts.tolist()} of the clusters"


def _variance_lines(v: dict[str, Any]) -> list[str]:
    random = v["random"]
    if random <= 0:
        return []  # all proxies are equal
    ratios = ", ".join(
        f"{name} {v[name] / random:.3f}" if v[name] is not None else f"{name} cannot reach this budget"
        for name in ("equal", "proportional", "neyman")
    )
    biased = v["bias_squared"] > _NO_BIAS * random
    samples = f"{random / v['bias_squared']:.0f} samples" if biased else ""
    bias = f"its squared bias equals the variance of random batches of {samples}" if biased else "no bias"
    return [
        f"predicted variance of a batch's mean proxy at this budget, random inside clusters, over random batches': {ratios}",
        f"what is kept: variance {v['kept'] / random:.3f}; {bias}",
    ]


def random_part(plan: Plan, number: int, seed: int, redraw: bool = False) -> Plan:
    """An arm to compare with: samples drawn at random from all that are in a cluster, one stratum, weight 1.

    Args:
        plan: whose samples are drawn from.
        number: to draw.
        seed: of the draw.
        redraw: whether every epoch draws its own.
    """
    usable = plan.cluster >= 0
    one = np.where(usable, 0, -1).astype(np.int32)
    kept = draw(one, plan._by_id, usable, np.array([number]), seed, 0)
    drawn = unselected(plan, kept)
    return replace(drawn, stratum=one, weight=usable * 1.0, pool=usable, redraw_seed=seed) if redraw else drawn


def unselected(plan: Plan, keep: np.ndarray) -> Plan:
    """An arm to compare with: the samples that `keep` [N] names, one stratum, weight 1."""
    return Plan(
        ids=plan.ids, cluster=plan.cluster, stratum=np.where(keep, 0, -1).astype(np.int32), distance=plan.distance,
        weight=keep.astype(np.float64), kept=keep, num_tokens=plan.num_tokens,
        num_supervised_tokens=plan.num_supervised_tokens, loss=plan.loss,
    )
