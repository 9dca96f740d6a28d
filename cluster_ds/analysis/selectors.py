"""Tables 8, 10 and 13: what each way to choose inside clusters does to centroids and to the diversity of gradients.

Gradient diversity of a selection S, GD = sum |g_i|^2 / |sum g_i|^2, is 1 / n times what n orthogonal gradients would
have, so it is shown as n x GD at equal n: 1 where all gradients are one, n where they are orthogonal. It is taken of the
proxies, as unit vectors and with their lengths; with `--true` of the gradients themselves, sketched. Shapes: N samples, H
hidden, K clusters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..models import load_model
from ..selection import PlanSettings, select
from .gradients import SKETCH, sketches_of
from .runs import Run

_DRAWS = 20  # of every selector that draws


def selections(run: Run, seed: int) -> dict[str, list[np.ndarray]]:
    """Rows that each selector keeps of the run's clusters, as many as the plan does; several draws of those that draw."""
    plan, rows = run.plan, run.usable
    labels, distances = plan.cluster[rows].astype(np.int64), plan.distance[rows]
    ids = np.argsort(np.argsort(np.asarray(plan.ids)[rows], kind="stable"))
    number = int(plan.kept.sum()) // plan.num_clusters * plan.num_clusters
    settings = PlanSettings(num_clusters=plan.num_clusters, keep=number / len(rows))

    def chosen(**how: Any) -> np.ndarray:
        return rows[select(labels, distances, ids, replace(settings, **how)).kept]

    out = {"random (no clusters)": [], "uniform (random inside clusters)": []}  # type: dict[str, list[np.ndarray]]
    for draw in range(_DRAWS):
        rng = np.random.default_rng((seed, 7, draw))
        out["random (no clusters)"].append(np.sort(rng.permutation(rows)[:number]))
        out["uniform (random inside clusters)"].append(chosen(choice="random", seed=seed + draw))
    out["core"], out["peripheral"] = [chosen(choice="core")], [chosen(choice="peripheral")]
    return out


def scaled_diversity(vectors: np.ndarray) -> float:
    """Number x gradient diversity of vectors [n, H]."""
    total = vectors.sum(axis=0, dtype=np.float64)
    return len(vectors) * float((vectors.astype(np.float64) ** 2).sum()) / max(float(total @ total), 1e-300)


def analyse_diversity(run: Run, seed: int, num_true: int = 0, size: int = SKETCH) -> dict[str, Any]:
    """Number x GD of each selector; `num_true` gradients of each are computed and sketched, if that is not 0."""
    unit, norms = run.unit, run.proxies.norms
    found: dict[str, Any] = {}
    chosen = selections(run, seed)
    for name, draws in chosen.items():
        values = {
            "unit proxies": [scaled_diversity(unit[rows]) for rows in draws],
            "proxies": [scaled_diversity(unit[rows] * norms[rows, None]) for rows in draws],
        }
        found[name] = {"num_samples": len(draws[0]), "num_draws": len(draws)} | {
            kind: {"mean": float(np.mean(v)), "std": float(np.std(v, ddof=1)) if len(v) > 1 else 0.0}
            for kind, v in values.items()
        }
    if num_true:
        rng = np.random.default_rng((seed, 8))
        few = {name: np.sort(rng.permutation(draws[0])[:num_true]) for name, draws in chosen.items()}
        every = np.unique(np.concatenate(list(few.values())))
        model = load_model(run.samples.model_folder, run.recipe.model, torch.float32, run.ranks.device).eval()
        sketches = sketches_of(model, run.samples.tokens, every, size, seed)
        for name, rows in few.items():
            value = scaled_diversity(sketches[np.searchsorted(every, rows)])
            found[name]["true gradients"] = {"mean": value, "num_samples": len(rows)}
    numbers = {"quantity": "number x gradient diversity", "seed": seed, "selectors": found}
    run.save("diversity", numbers)
    kinds = [k for k in ("unit proxies", "proxies", "true gradients") if k in next(iter(found.values()))]
    with run.picture("diversity") as figure:
        axes = figure.subplots()
        for place, kind in enumerate(kinds):
            x = np.arange(len(found)) + 0.25 * place
            errors = [entry[kind].get("std", 0.0) for entry in found.values()]
            axes.bar(x, [entry[kind]["mean"] for entry in found.values()], 0.24, yerr=errors, label=kind, capsize=2)
        axes.set_xticks(np.arange(len(found)) + 0.12 * (len(kinds) - 1), list(found), fontsize=8)
        axes.set(ylabel="n x gradient diversity")
        axes.legend()
    return numbers


def analyse_centroids(run: Run, seed: int) -> dict[str, Any]:
    """Cosine and l2 distance between the mean unit proxy of each whole cluster and of what each selector keeps of it."""
    plan, unit = run.plan, run.unit
    whole = [unit[plan.cluster == c].mean(axis=0) for c in range(plan.num_clusters)]
    found: dict[str, Any] = {}
    named = {name: draws for name, draws in selections(run, seed).items() if "no clusters" not in name}
    named["this plan"] = [np.flatnonzero(plan.kept)]
    for name, draws in named.items():
        pairs = np.array([[_compare(whole[c], unit[rows[plan.cluster[rows] == c]].mean(axis=0))
                           for c in range(plan.num_clusters)] for rows in draws])
        found[name] = {"cosine": pairs[..., 0].mean(axis=0).tolist(), "distance": pairs[..., 1].mean(axis=0).tolist()}
    numbers = {"sizes": np.bincount(plan.cluster[run.usable]).tolist(), "seed": seed, "selectors": found}
    run.save("centroids", numbers)
    with run.picture("centroids") as figure:
        axes = figure.subplots()
        for place, (name, entry) in enumerate(found.items()):
            axes.bar(np.arange(plan.num_clusters) + 0.2 * place, entry["distance"], 0.19, label=name)
        axes.set(xlabel="cluster", ylabel="distance of the centroids (unit proxies)")
        axes.set_xticks(range(plan.num_clusters))
        axes.legend()
    return numbers


def _compare(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / max(norms, 1e-300), float(np.linalg.norm(a - b))
