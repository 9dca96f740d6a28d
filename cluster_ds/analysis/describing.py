"""Table 11 and Figures 6a and 6b: what a plan holds, how like the workers' gradients were, and the proxies in a plane."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE

from ..run_log import read_lines
from .runs import Run

_MOST_POINTS = 5_000  # that t-SNE is given


def analyse_composition(run: Run) -> dict[str, Any]:
    """Samples, tokens and loss before training, in all and kept, of every cluster and every source."""
    plan = run.plan
    sources = np.array(plan.source or ["data"] * len(plan))
    groups = {f"cluster {c}": plan.cluster == c for c in range(plan.num_clusters)}
    if len(set(sources)) > 1:
        groups |= {f"source {name}": sources == name for name in sorted(set(sources))}
    groups["all"] = np.ones(len(plan), dtype=bool)
    rows = {}
    for name, mask in groups.items():
        kept = mask & plan.kept
        rows[name] = {
            "samples": int(mask.sum()), "kept": int(kept.sum()), "kept_fraction": float(kept.sum() / max(mask.sum(), 1)),
            "tokens": int(plan.num_tokens[mask].sum()), "kept_tokens": int(plan.num_tokens[kept].sum()),
            "supervised_tokens": int(plan.num_supervised_tokens[mask].sum()),
            "kept_supervised_tokens": int(plan.num_supervised_tokens[kept].sum()),
            "mean_supervised_tokens": _mean(plan.num_supervised_tokens, mask),
            "kept_mean_supervised_tokens": _mean(plan.num_supervised_tokens, kept),
            "mean_loss": _mean(plan.loss, mask), "kept_mean_loss": _mean(plan.loss, kept),
        }
    numbers = {"groups": rows, "distance_length_correlation": plan.manifest.get("distance_length_correlation")}
    run.save("composition", numbers)
    with run.picture("composition") as figure:
        axes = figure.subplots()
        names = [name for name in rows if name != "all"]
        axes.barh(names, [rows[n]["samples"] for n in names], color="#cccccc", label="samples")
        axes.barh(names, [rows[n]["kept"] for n in names], label="kept")
        axes.invert_yaxis()
        axes.legend()
    return numbers


def analyse_worker_cosine(run: Run) -> dict[str, Any]:
    """The mean cosine between the ranks' gradients, over the steps at which `train.diagnose_every` looked.

    Raises:
        ValueError: if it never did, or there was one rank.
    """
    entries = [e for e in read_lines(run.folder / "log.jsonl") if e.get("rank_cosine") is not None]
    if not entries:
        raise ValueError(
            f"{run.folder / 'log.jsonl'} has no cosines of ranks: train on two ranks or more with train.diagnose_every set"
        )
    steps, cosines = [e["step"] for e in entries], [e["rank_cosine"] for e in entries]
    numbers = {
        "steps": steps, "mean_cosines": cosines, "mean": float(np.mean(cosines)), "allocation": run.recipe.train.allocation,
        "standard_error_of_a_cosine": entries[0].get("standard_error"),
    }
    run.save("worker_cosine", numbers)
    with run.picture("worker_cosine") as figure:
        axes = figure.subplots()
        axes.plot(steps, cosines, marker=".")
        axes.set(xlabel="step", ylabel="mean cosine of the ranks' gradients", title=f"allocation {numbers['allocation']}")
        axes.grid(alpha=0.3)
    return numbers


def analyse_projection(run: Run, seed: int) -> dict[str, Any]:
    """The unit proxies in a plane, by principal components and by t-SNE, coloured by cluster and by kept."""
    plan, rng = run.plan, np.random.default_rng((seed, 9))
    rows = np.sort(rng.permutation(run.usable)[:_MOST_POINTS])
    pca = PCA(min(50, len(rows), run.unit.shape[1]), random_state=seed)
    scores = pca.fit_transform(run.unit[rows])
    perplexity = min(30.0, (len(rows) - 1) / 3)
    near = TSNE(2, init="pca", perplexity=perplexity, random_state=seed).fit_transform(scores)
    numbers = {
        "sample_ids": [plan.ids[r] for r in rows], "cluster": plan.cluster[rows].tolist(), "kept": plan.kept[rows].tolist(),
        "pca": scores[:, :2].tolist(), "pca_explained_variance": pca.explained_variance_ratio_[:2].tolist(),
        "tsne": near.tolist(), "tsne_perplexity": perplexity, "seed": seed,
    }
    run.save("projection", numbers)
    with run.picture("projection", 10, 9) as figure:
        for axes_row, (points, name) in zip(figure.subplots(2, 2), ((scores, "PCA"), (near, "t-SNE")), strict=True):
            for axes, colors, what in zip(axes_row, (plan.cluster[rows], plan.kept[rows]), ("cluster", "kept"), strict=True):
                axes.scatter(points[:, 0], points[:, 1], c=colors, s=5, cmap="tab10" if what == "cluster" else "coolwarm")
                axes.set(title=f"{name}, coloured by {what}", xticks=[], yticks=[])
    return numbers


def _mean(values: np.ndarray, mask: np.ndarray) -> float | None:
    chosen = values[mask]
    chosen = chosen[np.isfinite(chosen)]
    return float(chosen.mean()) if len(chosen) else None
