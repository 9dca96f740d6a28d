"""A whole selection as N grows to a million: python benchmarks/scale.py --n 1000000 --d 512 --k 8.

Unit vectors in clusters of Zipf-distributed sizes are written as extraction writes them, shards with checksums and their
projection; then what a run does behind extraction is timed for N / 10, N / 3 and N: opening and verifying the shards,
clusters within binding bounds, near-duplicates, selection, bias and variances. At most 1,024 files may be open, the usual
limit.
"""

import argparse
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from common import claim, peak_anonymous, show, write  # isort: skip

import numpy as np

from cluster_ds.features import projection_matrix
from cluster_ds.planning import make_plan
from cluster_ds.shards import length_batches, read_proxies, shard_batches, write_shard

TOKENS_PER_BATCH = 16_384


class Lengths:
    """Of a token table, what the layout of shards depends on."""

    def __init__(self, num_tokens: np.ndarray):
        self.num_tokens = num_tokens

    def __len__(self) -> int:
        return len(self.num_tokens)


def write_shards(folder: Path, lengths: np.ndarray, d: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    centers, shares = 0.6 * rng.normal(size=(12, d)).astype(np.float32), 1 / np.arange(1, 13)
    spread, matrix = np.where(np.arange(d) < d // 4, 1.0, 0.3).astype(np.float32), projection_matrix(d)
    for number, batches in enumerate(shard_batches(length_batches(lengths, TOKENS_PER_BATCH))):
        rows = np.concatenate(batches)
        x = centers[rng.choice(12, len(rows), p=shares / shares.sum())]
        x += rng.standard_normal((len(rows), d), dtype=np.float32) * spread
        x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float16)
        norms = rng.gamma(4.0, 1.0, len(rows)).astype(np.float32)
        projection = (x.astype(np.float32) @ matrix).astype(np.float16)
        write_shard(folder, number, "scale", {"rows": rows, "features": x, "projection": projection, "norms": norms,
                                              "losses": norms}, seconds=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=1.2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the shards, 3 N d bytes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    found = []
    for n in (args.n // 10, args.n // 3, args.n):
        ids = [f"{number * 2654435761 % 2**64:016x}-0" for number in range(n)]  # as ids are: hashes, in no order
        lengths = np.clip(np.random.default_rng(1).lognormal(5.5, 0.7, n), 16, 2048).astype(np.int64)
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        write_shards(folder, lengths, args.d)
        with peak_anonymous(0.02) as peak:
            started = time.perf_counter()
            proxies = read_proxies(folder, Lengths(lengths), TOKENS_PER_BATCH, "scale")
            plan = make_plan(proxies.features, ids, lengths, norms=proxies.norms, losses=proxies.losses, num_clusters=args.k,
                             alpha=args.alpha, ratio=0.5, report=print)
            seconds = time.perf_counter() - started
        m = plan.manifest
        facts = {name: m[name] for name in ("sizes", "cap", "floor", "gap", "num_moved", "num_kept")}
        found.append({"n": n, "shards": len(proxies.features.parts), "seconds": seconds, "us_a_sample": 1e6 * seconds / n,
                      "anonymous_bytes": peak.most, **facts})
        print(f"n = {n}: {seconds:.1f} s, {peak.most / 1e9:.2f} GB; sizes {m['sizes']}, bounds [{m['floor']}, {m['cap']}], "
              f"{m['num_moved']} moved by them, gap {m['gap']:.1e}", flush=True)
        del plan, ids, proxies
        shutil.rmtree(folder)
    show(f"d = {args.d}, K = {args.k}, alpha {args.alpha}", ["N", "shards", "s", "us a sample", "anonymous GB", "gap"],
         [[f["n"], f["shards"], f["seconds"], f["us_a_sample"], f["anonymous_bytes"] / 1e9, f["gap"]] for f in found])
    flat = found[-1]["us_a_sample"] / found[0]["us_a_sample"]
    within = all(max(f["sizes"]) <= f["cap"] and min(f["sizes"]) >= f["floor"] and f["num_moved"] > 0 for f in found)
    held = [
        claim("under 3 GB of anonymous memory in the whole process", max(f["anonymous_bytes"] for f in found) < 3e9),
        claim(f"time a sample is flat: the last is at most 1.1 x the first ({flat:.2f})", flat <= 1.1),
        claim("the bounds hold and bind", within),
    ]
    write(args.json, {"d": args.d, "k": args.k, "alpha": args.alpha, "results": found, "held": all(held)})
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
