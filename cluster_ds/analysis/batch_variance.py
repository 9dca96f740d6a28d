"""Figure 2 and the propositions: the variance of a batch's mean proxy, predicted and measured on drawn batches.

Predicted is what the plan's manifest says for endless data (sampling with replacement), and what holds for batches of whole,
different samples; measured are batches of schedules that draw anew every epoch, random inside clusters, by each quota and
without clusters. What is kept in this very plan is biased as well: the manifest's bias is repeated. Shapes: N samples, K
clusters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..plan import Plan, random_part
from ..planning import plan_from
from ..prepare import cluster_samples
from ..schedule import Schedule
from ..selection import QUOTAS
from ..variance import Moments, finite_batch_variance, simulate
from .runs import Run


def moments_of(vectors: np.ndarray, labels: np.ndarray) -> Moments:
    """Sums and squares of vectors [N, H] by cluster int64 [N]."""
    sizes = np.bincount(labels)
    sums = np.array([vectors[labels == c].sum(axis=0) for c in range(len(sizes))])
    return Moments.of(sums, sizes, np.bincount(labels, (vectors**2).sum(axis=1)))


def drawn(plan: Plan, labels: np.ndarray, gradients: np.ndarray, size: int, num_batches: int) -> dict[str, float]:
    """Predicted and measured variance of full batches of a plan whose samples are drawn anew every epoch."""
    moments = moments_of(gradients, labels)
    steps_per_epoch = int(plan.kept.sum()) // size
    epochs = -(-num_batches // steps_per_epoch)
    schedule = Schedule(plan, global_batch_size=size, epochs=epochs)
    batches = [schedule.batch(e * schedule.steps_per_epoch + s) for e in range(epochs) for s in range(steps_per_epoch)]
    in_batch = [np.bincount(labels[b.rows], minlength=len(moments.sizes)) for b in batches]
    whole = [i for i, counts in enumerate(in_batch) if counts.all()]
    predicted = [finite_batch_variance(moments, in_batch[i]) for i in whole]
    mean, error = simulate(gradients, [(batches[i].rows, batches[i].weights) for i in whole])
    return {"predicted": float(np.mean(predicted)), "measured": mean, "standard_error": error, "batches": len(whole),
            "without_a_cluster": len(batches) - len(whole)}


def analyse(run: Run, num_batches: int) -> dict[str, Any]:
    """All quotas and random batches at the plan's budget and the recipe's batch size, over random's prediction.

    Raises:
        ValueError: for a plan that is not of all samples, or keeps more than equal parts can be.
    """
    plan, size = run.plan, run.recipe.train.global_batch_size
    settings = plan.manifest["selection"]
    if "trim" not in settings:
        raise ValueError(f"{run.folder} was not selected from clusters: use a run of launch/train.py, or a cluster arm's")
    if settings["trim"] or settings["dedup"] or (plan.cluster < 0).any():
        raise ValueError(f"{run.folder} trims, leaves near-duplicates out, or has zero proxies: use a plan of all samples")
    if plan.manifest["variance"]["equal"] is None:
        raise ValueError(f"{run.folder} keeps more than equal parts of its clusters can be: lower the budget")
    gradients = run.unit.astype(np.float64) * run.proxies.norms[:, None]
    clusters = {"num_clusters": plan.num_clusters}  # "world" meant the ranks of the run
    recipe = run.recipe.model_copy(update={"selection": run.recipe.selection.model_copy(update=clusters)})
    clustered = cluster_samples(recipe, run.samples, run.ranks)
    redrawn: dict[str, Any] = {
        "choice": "random", "weighting": "cluster", "redraw": "epoch", "balance": "whole", "ratio": None,
        "keep": int(plan.kept.sum()) / len(plan),
    }

    def arm(quota: str) -> Plan:
        return plan_from(clustered, replace(clustered.settings, quota=quota, **redrawn), lambda line: None)

    arms = {quota: arm(quota) for quota in QUOTAS}
    labels, one = plan.cluster.astype(np.int64), np.zeros(len(plan), dtype=np.int64)
    found = {"random": drawn(random_part(plan, int(plan.kept.sum()), 0, redraw=True), one, gradients, size, num_batches)}
    found |= {quota: drawn(made, labels, gradients, size, num_batches) for quota, made in arms.items()}
    formula, unit = arms["equal"].manifest["variance"], found["random"]["predicted"]
    rows = {
        name: {
            "formula": formula[name] / formula["random"], "batches": f["batches"],
            **{what: f[what] / unit for what in ("predicted", "measured", "standard_error")},
        } for name, f in found.items()
    }
    numbers = {
        "quantity": "variance of a batch's mean proxy over random batches'", "batch": size, "arms": rows,
        "this plan": {"variance": plan.manifest["variance"], "bias": plan.manifest["bias"]},
    }
    run.save("variance", numbers)
    with run.picture("variance") as figure:
        axes = figure.subplots()
        x = np.arange(len(rows))
        axes.bar(x - 0.2, [r["predicted"] for r in rows.values()], 0.38, label="predicted")
        axes.bar(x + 0.2, [r["measured"] for r in rows.values()], 0.38, label="measured", capsize=3,
                 yerr=[2 * r["standard_error"] for r in rows.values()])
        axes.set_xticks(x, list(rows))
        axes.set(ylabel="variance over random's", title=f"batches of {size}, {int(plan.kept.sum())} of {len(plan)} samples")
        axes.legend()
    return numbers
