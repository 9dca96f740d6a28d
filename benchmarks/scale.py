"""A whole selection as N grows to a million: python benchmarks/scale.py --n 1000000 --d 512 --k 8.

Features lie on disk as float16; clusters, near-duplicates, selection, bias and variances are computed as in a run. Time and
anonymous memory for N / 10, N / 3 and N.
"""

import argparse
import tempfile
import time
from pathlib import Path

from common import claim, clustered_file, peak_anonymous, show, write  # isort: skip

import numpy as np

from cluster_ds.planning import make_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=1.2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the features, 2 N d bytes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    x = clustered_file(args.folder / f"cluster_ds_benchmark_{args.n}x{args.d}.npy", args.n, args.d)
    found = []
    for n in (args.n // 10, args.n // 3, args.n):
        ids = [f"{number:016x}" for number in range(n)]
        lengths = np.random.default_rng(0).integers(50, 1000, n)
        with peak_anonymous(0.02) as peak:
            started = time.perf_counter()
            plan = make_plan(x[:n], ids, lengths, num_clusters=args.k, alpha=args.alpha, ratio=0.5, report=print)
            seconds = time.perf_counter() - started
        m = plan.manifest
        facts = {name: m[name] for name in ("sizes", "cap", "floor", "gap", "num_moved", "num_kept")}
        found.append({"n": n, "seconds": seconds, "us_a_sample": 1e6 * seconds / n, "anonymous_bytes": peak.most, **facts})
        print(f"n = {n}: {seconds:.1f} s, {peak.most / 1e9:.2f} GB; sizes {m['sizes']}, bounds [{m['floor']}, {m['cap']}], "
              f"{m['num_moved']} moved by them, gap {m['gap']:.1e}", flush=True)
        del plan, ids
    show(f"d = {args.d}, K = {args.k}, alpha {args.alpha}", ["N", "s", "us a sample", "anonymous GB", "gap"],
         [[f["n"], f["seconds"], f["us_a_sample"], f["anonymous_bytes"] / 1e9, f["gap"]] for f in found])
    flat = found[-1]["us_a_sample"] / found[0]["us_a_sample"]
    within = all(max(f["sizes"]) <= f["cap"] and min(f["sizes"]) >= f["floor"] and f["num_moved"] > 0 for f in found)
    held = [
        claim("under 3 GB of anonymous memory in the whole process", max(f["anonymous_bytes"] for f in found) < 3e9),
        claim(f"time a sample is flat: the last is at most 1.1 x the first ({flat:.2f})", flat <= 1.1),
        claim("the bounds hold and bind", within),
    ]
    write(args.json, {"d": args.d, "k": args.k, "alpha": args.alpha, "results": found, "held": all(held)})


if __name__ == "__main__":
    main()
