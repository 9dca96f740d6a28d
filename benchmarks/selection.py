"""Variance of quotas and bias of the periphery on a run's own proxies: python benchmarks/selection.py runs/quickstart.

  variance   of the batch gradient's stand-in, the weighted mean of proxies before normalisation: random batches, equal,
             proportional and Neyman quotas at the same budget, predicted and by drawing batches, with samples drawn anew
             every epoch
  shift      of the mean proxy under the peripheral choice as calibrated weights' effective sample size is let fall
"""

import argparse
import sys
from pathlib import Path

from common import claim, show, write  # isort: skip

import numpy as np

from cluster_ds.analysis.batch_variance import drawn
from cluster_ds.plan import Plan, random_part
from cluster_ds.planning import make_plan
from cluster_ds.prepare import cache_dir
from cluster_ds.recipe_file import load_recipe
from cluster_ds.selection import QUOTAS
from cluster_ds.shards import read_proxies
from cluster_ds.tokens import TokenTable

LEAST = (0.98, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder with its plan")
    parser.add_argument("--batches", type=int, default=4000, help="drawn for each row of the table")
    parser.add_argument("--picture", type=Path, help="where the curve of shift against effective sample size is drawn")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    plan = Plan.read(args.run / "plan")
    recipe, provenance = load_recipe(str(args.run / "recipe.yaml")), plan.manifest["provenance"]
    cache = cache_dir(recipe, args.run.resolve())
    tokens = TokenTable(cache / "tokens" / provenance["tokens"])
    key = provenance["proxies"]
    proxies = read_proxies(cache / "proxies" / key, tokens, recipe.selection.tokens_per_batch, key)
    settings = {**plan.manifest["selection"], "ratio": None, "keep": int(plan.kept.sum()) / len(plan)}
    common = {"num_supervised_tokens": tokens.num_supervised, "norms": proxies.norms}
    unit = np.concatenate(proxies.features.parts)[np.argsort(proxies.features.rows)].astype(np.float64)
    unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-300)
    gradients = unit * proxies.norms[:, None]

    def planned(**changes: object) -> Plan:
        return make_plan(proxies.features, tokens.ids, tokens.num_tokens, **common, **{**settings, **changes})

    if settings["trim"] or settings["dedup"] or (plan.cluster < 0).any():
        sys.exit(f"{args.run} trims, leaves near-duplicates out, or has zero proxies: use a plan of all samples")
    size = recipe.train.global_batch_size
    redrawn = {"choice": "random", "weighting": "cluster", "redraw": "epoch", "balance": "whole"}
    if plan.manifest["variance"]["equal"] is None:
        sys.exit(f"{args.run} keeps more than equal parts of its clusters can be: the quotas cannot be set side by side")
    arms = {quota: planned(quota=quota, **redrawn) for quota in QUOTAS}
    labels = arms["equal"].cluster.astype(np.int64)
    one = np.zeros(len(labels), dtype=np.int64)
    found = {"random": drawn(random_part(plan, int(plan.kept.sum()), 0, redraw=True), one, gradients, size, args.batches)}
    found |= {quota: drawn(arm, labels, gradients, size, args.batches) for quota, arm in arms.items()}
    told = arms["equal"].manifest["variance"]
    rows: list[list[object]] = [
        [name, told[name] / told["random"], f["predicted"] / found["random"]["predicted"],
         f["measured"] / found["random"]["predicted"], f["standard_error"] / found["random"]["predicted"], f["batches"],
         (f["measured"] - f["predicted"]) / f["standard_error"]]
        for name, f in found.items()
    ]
    show(f"variance of a batch of {size}, over random's; {int(plan.kept.sum())} of {len(plan)} samples",
         ["", "formula", "exact at this size", "drawn", "standard error", "batches", "off by, in errors"], rows)
    held = []
    for name, f in found.items():
        formula = told[name] / size  # of endless clusters; the exact one knows that a batch holds whole, different samples
        held += [
            claim(f"{name}: drawn batches agree with the exact prediction within 3 standard errors",
                  abs(f["measured"] - f["predicted"]) < 3 * f["standard_error"]),
            claim(f"{name}: and with the plan's formula within 3 of them and 5 % ({f['measured'] / formula:.3f})",
                  abs(f["measured"] - formula) < 3 * f["standard_error"] + 0.05 * formula),
        ]

    curve = []
    for least in LEAST:
        m = planned(choice="peripheral", quota="equal", weighting="calibrated", min_effective=least).manifest
        c = m["calibration"]
        curve.append({**c, "total_effective_sample_size": m["effective_sample_size"], "min_effective": least,
                      "factor": c["shift_before"] / c["shift_after"]})
    show("shift of the mean proxy under the peripheral choice, calibrated",
         ["least effective size", "found", "with cluster weights", "shift before", "after", "factor", "largest weight"],
         [[c["min_effective"], c["effective_sample_size"], c["total_effective_sample_size"], c["shift_before"],
           c["shift_after"], c["factor"], c["largest_weight"]] for c in curve])
    best = max(c["factor"] for c in curve if c["effective_sample_size"] >= 0.75)
    held.append(claim(f"the shift falls by 2 x or more at effective sample size .75 or more ({best:.2f})", best >= 2))
    if args.picture is not None:
        draw_curve(args.picture, curve, recipe.name)
    write(args.json, {"variance": found, "formula": told, "calibration": curve, "batch": size, "held": all(held)})
    sys.exit(not all(held))


def draw_curve(path: Path, curve: list[dict], name: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cluster-ds"  # the same file from the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    points = [(1.0, curve[0]["shift_before"]), *((c["effective_sample_size"], c["shift_after"]) for c in curve)]
    axes.plot(*zip(*points, strict=True), marker="o")
    axes.set(xlabel="effective sample size inside clusters", ylabel="relative shift of the mean proxy",
             title=f"{name}: peripheral choice, calibrated weights", ylim=(0, None))
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    print(f"drawn in {path}")


if __name__ == "__main__":
    main()
