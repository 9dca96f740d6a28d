"""The selection report: what was kept and why, for a person who reads no code. Shapes: N samples, K clusters, W ranks.

Figures of single samples show a part of them, drawn at random; all counts are of all samples.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from .. import __version__
from ..dry_run import duration, prediction_of
from ..estimate import arms_of, loads_of_arms, loads_of_steps, steps_text
from ..files import is_committed, write_text
from ..prepare import Prepared
from ..recipe import Recipe
from ..shapes import quadratic_cost
from .page import (
    COLORS,
    Html,
    details,
    document,
    facts,
    figure,
    hover_text,
    join,
    paragraph,
    preformatted,
    shorten,
    table,
)
from .view import SHOWN_TOKENS, View

NAME = "selection.html"
_EXAMPLE_CHARS = 1_200
_EXAMPLES = 3  # nearest and farthest of every cluster
_ROWS = 20  # of a table of single rows
_BINS = 40
_BAR_COLORS = ("#b8b8c0", "#7f7f8a", COLORS[5], COLORS[0])


def write_selection_report(recipe: Recipe, prepared: Prepared, output_dir: Path, world_size: int) -> Path:
    """Write the report of a plan, unless it is there and nothing that it speaks of has changed, or the run is finished.

    Args:
        recipe, prepared, output_dir: of the run.
        world_size: W of the training that the report speaks of.
    Returns:
        the file.
    """
    basis = [prepared.plan.hash, world_size, recipe.train.model_dump(), prediction_of(output_dir, world_size, recipe)]
    path, digest = output_dir / NAME, hashlib.blake2b(json.dumps(basis).encode(), digest_size=8).hexdigest()
    mark = f"<!-- plan {prepared.plan.hash}, {digest} -->"
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            first = file.readline().strip()
        if first == mark or (is_committed(output_dir / "model") and first.startswith(f"<!-- plan {prepared.plan.hash},")):
            return path
    view = View(recipe, prepared, output_dir, world_size)
    write_text(path, f"{mark}\n{_page(view)}")
    return path


def _page(view: View) -> str:
    plan, m = view.plan, view.manifest
    kept = plan.kept
    lead = join([
        paragraph(
            f"{m['selection']['choice']} choice of {m['num_kept']} of {len(plan)} samples from {len(m['sizes'])} clusters "
            f"of gradient proxies of {m['provenance'].get('model_name', 'given features')}", "soft",
        ),
        facts({
            "samples": f"{len(plan):,}", "kept": f"{m['num_kept']:,} ({m['num_kept'] / len(plan):.1%})",
            "tokens kept": f"{plan.num_tokens[kept].sum() / plan.num_tokens.sum():.1%}",
            "supervised tokens kept": f"{plan.num_supervised_tokens[kept].sum() / plan.num_supervised_tokens.sum():.1%}",
            "effective sample size": f"{m['effective_sample_size']:.3f}", "clusters": len(m["sizes"]),
        }),
        *(paragraph(line.removeprefix("warning: "), "warn") for line in plan.lines() if line.startswith("warning")),
    ])  # fmt: skip
    return document(f"Selection: {view.recipe.name}", lead, [
        ("Clusters", _sizes(view)), ("Map", _map(view)), ("Each cluster", _clusters(view)),
        ("Weights and bias", _weights(view)), ("Distance and length", _lengths(view)), ("Ranks and time", _time(view)),
        ("Rows", _rows(view)), ("Where this comes from", _provenance(view)),
    ])  # fmt: skip


def _sizes(view: View) -> Html:
    m, k = view.manifest, len(view.manifest["sizes"])
    names, equal = [str(c) for c in range(k)], m["selection"]["quota"] == "equal"
    within = np.bincount(view.plan.cluster[view.clustered], minlength=k).tolist()
    series = {"nearest centroid, no bounds": m.get("nearest_sizes"), "within the bounds": within}
    if within != m["sizes"]:
        series["without near-duplicates"] = m["sizes"]
    if equal:
        series["equal parts"] = [min(m["sizes"])] * k
    series["kept"] = m["counts"]
    traces = [
        {"type": "bar", "name": name, "x": names, "y": values, "marker": {"color": color},
         "hovertemplate": f"cluster %{{x}}, {name}: %{{y}}<extra></extra>"}
        for (name, values), color in zip(series.items(), _BAR_COLORS, strict=False) if values
    ]  # fmt: skip
    bounds = [
        {"type": "scatter", "mode": "lines", "name": f"{name} {m[name]}", "x": names, "y": [m[name]] * k,
         "line": {"dash": dash, "color": COLORS[4], "width": 2}, "hoverinfo": "name"}
        for name, dash in (("cap", "dash"), ("floor", "dot"))
    ]  # fmt: skip
    shares = [f"{count / size:.1%}" for count, size in zip(m["counts"], m["sizes"], strict=True)]
    rows = [
        [title, *(values[c] for values in series.values() if values), shares[c], f"{m['weights'][c]:.3f}"]
        for c, title in enumerate(view.titles)
    ]
    moved = f"{m['num_moved']} samples are not in their nearest cluster because of the bounds. " if m["num_moved"] else ""
    return join([
        paragraph(f"{moved}{'The smallest cluster decides how many an equal part is. ' if equal else ''}Titles are the "
                  "terms that tell a cluster from the others best; they are no labels that anybody gave."),
        figure([*traces, *bounds], barmode="group", showlegend=True,
               xaxis={"title": {"text": "cluster"}, "type": "category"}, yaxis={"title": {"text": "samples"}}),
        table(["cluster", *(name for name, values in series.items() if values), "share kept", "weight"], rows, text=(0,)),
    ])  # fmt: skip


def _map(view: View) -> Html:
    if view.plane is None:
        return paragraph("The proxies are not in the cache any more, so there is no map.", "soft")
    xy, explained = view.plane
    plan, rows = view.plan, view.shown
    texts = np.array([hover_text(view.text(row)) for row in rows])
    traces = []
    for c, title in enumerate(view.titles):
        for kept in (False, True):
            mine = (plan.cluster[rows] == c) & (plan.kept[rows] == kept)
            traces.append({
                "type": "scatter", "mode": "markers", "x": xy[mine, 0], "y": xy[mine, 1], "text": texts[mine],
                "name": f"{title}, kept" if kept else f"{c}, left out", "legendgroup": str(c),
                "marker": {"color": COLORS[c % len(COLORS)], "size": 6 if kept else 5, "opacity": 0.9 if kept else 0.4,
                           "symbol": "circle" if kept else "circle-open"},
                "customdata": plan.distance[rows][mine],
                "hovertemplate": f"cluster {c}, {'kept' if kept else 'left out'}, distance %{{customdata:.3f}}<br>%{{text}}"
                                 "<extra></extra>",
            })  # fmt: skip
    drawn = f"{len(rows):,} of {len(view.clustered):,} samples, drawn at random. " if len(rows) < len(view.clustered) else ""
    return join([
        paragraph(
            f"Proxies as unit vectors on their first two principal components, which hold {explained.sum():.0%} of the "
            f"variance: near in the picture need not be near in all dimensions. {drawn}Full circles are kept, open ones "
            "left out; a click on a name hides it."
        ),
        figure(traces, height=560, showlegend=True, xaxis={"title": {"text": f"component 1 ({explained[0]:.0%})"}},
               yaxis={"title": {"text": f"component 2 ({explained[1]:.0%})"}}),
    ])  # fmt: skip


def _clusters(view: View) -> Html:
    plan, m = view.plan, view.manifest
    parts = []
    for c, title in enumerate(view.titles):
        mine = np.flatnonzero(plan.cluster == c)
        kept = plan.kept[mine]
        order = mine[np.argsort(plan.distance[mine], kind="stable")]
        lengths = [np.quantile(plan.num_supervised_tokens[rows], (0.1, 0.5, 0.9)) if len(rows) else [np.nan] * 3
                   for rows in (mine, mine[kept], mine[~kept])]
        quantiles = table(
            ["supervised tokens", "samples", "10 %", "median", "90 %"],
            [[name, len(rows), *(f"{q:.0f}" for q in values)] for name, rows, values in
             zip(("all", "kept", "left out"), (mine, mine[kept], mine[~kept]), lengths, strict=True)],
        )  # fmt: skip
        examples = [
            details(f"{name}: {' '.join(view.text(row).split())[:90]}…", join([
                paragraph(f"{plan.ids[row]}, distance {plan.distance[row]:.3f}, {plan.num_tokens[row]} tokens, "
                          f"{'kept, weight ' + format(plan.weight[row], '.3f') if plan.kept[row] else 'left out'}", "soft"),
                preformatted(shorten(view.text(row, SHOWN_TOKENS), _EXAMPLE_CHARS)),
            ]))
            for name, rows in (("near", order[:_EXAMPLES]), ("far", order[: -_EXAMPLES - 1 : -1])) for row in rows
        ]  # fmt: skip
        content = join([_distances(view, c, mine, kept), quantiles, _sources(view, mine), *examples])
        cosine = m["bias"]["cosines"][c]
        parts.append(details(
            f"Cluster {title} — {len(mine)} samples, {int(kept.sum())} kept, weight {m['weights'][c]:.3f}; cosine of the "
            f"kept part's mean with the whole cluster's {cosine:.4f}", content, is_open=c == 0,
        ))  # fmt: skip
    return join(parts)


def _distances(view: View, c: int, mine: np.ndarray, kept: np.ndarray) -> Html:
    distances, selection = view.plan.distance[mine], view.manifest["selection"]
    least, most = float(distances.min()), float(distances.max())
    edges = np.linspace(least, max(most, least + 1e-6 * max(1.0, least)), _BINS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    traces = [
        {"type": "bar", "name": name, "x": middles, "y": np.histogram(distances[mask], edges)[0],
         "width": np.diff(edges), "marker": {"color": color}}
        for name, mask, color in (("kept", kept, COLORS[c % len(COLORS)]), ("left out", ~kept, "#b8b8c0"))
    ]  # fmt: skip
    ends = [] if not kept.any() else [distances[kept].min(), distances[kept].max()]
    cuts = {"peripheral": ends[:1], "core": ends[1:]}.get(selection["choice"], []) if selection["balance"] == "whole" else []
    cuts += ends[1:] if selection["trim"] and selection["choice"] == "peripheral" else []
    shapes = [{"type": "line", "x0": cut, "x1": cut, "y0": 0, "y1": 1, "yref": "paper",
               "line": {"dash": "dash", "color": COLORS[4]}} for cut in cuts]  # fmt: skip
    return figure(traces, height=240, barmode="stack", bargap=0, showlegend=True, shapes=shapes,
                  xaxis={"title": {"text": "distance to the centroid" + ("; dashed: the cut" if shapes else "")}},
                  yaxis={"title": {"text": "samples"}})  # fmt: skip


def _sources(view: View, mine: np.ndarray) -> Html:
    names = np.array(view.plan.source) if view.plan.source else None
    if names is None:
        return Html("")
    kept = view.plan.kept
    return table(["source", "samples", "kept"], [
        [name, int((names[mine] == name).sum()), int((kept[mine] & (names[mine] == name)).sum())]
        for name in sorted(set(names))
    ])  # fmt: skip


def _weights(view: View) -> Html:
    m, plan = view.manifest, view.plan
    lines = [line for line in plan.lines() if "weights" in line or "calibrated" in line or "mean proxy" in line]
    told = "A weight makes up for a cluster's share of what is kept, so that the weighted batches stand for all the data. "
    if m["selection"]["weighting"] == "none":
        told = "All weights are 1, so clusters count by what is kept of them, not by their share of the data. "
    parts = [
        paragraph(f"{told}The effective sample size is (sum w)² / (n sum w²): 1 where all weights are equal."),
        *(paragraph(line) for line in lines),
    ]  # fmt: skip
    v = m.get("variance")
    if v and v["random"] > 0:
        named = {
            "random batches of all data": v["random"], "equal quotas, random inside": v["equal"],
            "proportional quotas": v["proportional"], "Neyman quotas": v["neyman"], "what is kept": v["kept"],
            "what is kept, with its squared bias": v["kept"] + v["bias_squared"],
        }  # fmt: skip
        rows = [[name, f"{value / v['random']:.3f}" if value is not None else "cannot reach this budget"]
                for name, value in named.items()]  # fmt: skip
        parts.append(table(["mean proxy of a batch of one", "variance over random's"], rows))
        size = view.recipe.train.global_batch_size
        total = (v["kept"] / size + v["bias_squared"]) / (v["random"] / size)
        parts.append(paragraph(
            f"Variance falls with the size of a batch, bias does not: at {size} samples a batch, variance and squared bias "
            f"together are {total:.3f} times the variance of random batches.", "warn" if total > 1 else "",
        ))  # fmt: skip
    parts.append(table(
        ["cluster", "cosine of the kept part's mean with the cluster's"],
        [[c, f"{cosine:.4f}"] for c, cosine in enumerate(m["bias"]["cosines"])],
    ))
    return join(parts)


def _lengths(view: View) -> Html:
    plan, rows = view.plan, view.shown
    traces = [
        {"type": "scatter", "mode": "markers", "name": "kept" if kept else "left out",
         "x": plan.num_supervised_tokens[rows][plan.kept[rows] == kept], "y": plan.distance[rows][plan.kept[rows] == kept],
         "marker": {"size": 4, "opacity": 0.6, "color": COLORS[0] if kept else "#9a9aa6"}}
        for kept in (False, True)
    ]  # fmt: skip
    r = view.manifest["distance_length_correlation"]
    means = [plan.num_supervised_tokens[mask].mean() for mask in (plan.cluster >= 0, plan.kept)]
    return join([
        paragraph(f"Correlation of distance with supervised tokens: {r:+.2f}. The mean of few tokens is noisy, so short "
                  f"answers may lie far out: a sample has {means[0]:.1f} supervised tokens on average, a kept one "
                  f"{means[1]:.1f}."),
        figure(traces, showlegend=True, xaxis={"title": {"text": "supervised tokens"}, "type": "log"},
               yaxis={"title": {"text": "distance to the centroid"}}),
    ])  # fmt: skip


def _time(view: View) -> Html:
    try:
        return _predicted_time(view)
    except ValueError as error:  # a selection can be of use to others where this recipe cannot train on it
        return paragraph(f"This recipe cannot train on it with {view.world_size} ranks: {error}", "warn")


def _predicted_time(view: View) -> Html:
    recipe, plan, w = view.recipe, view.plan, view.world_size
    quadratic = quadratic_cost(view.prepared.model_folder)
    bars, lines = [], []
    for allocation, color in (("cluster", COLORS[0]), ("tokens", COLORS[1])):
        changed = recipe.model_copy(update={"train": recipe.train.model_copy(update={"allocation": allocation})})
        loads = loads_of_steps(plan, changed, w, quadratic)
        skew = float((loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1e-9)).mean())
        mine = " (this recipe's)" if allocation == recipe.train.allocation else ""
        lines.append(f"allocation {allocation}{mine}: the slowest rank of a step computes {skew:.2f} x the mean")
        bars.append({"type": "bar", "name": allocation, "x": [f"rank {r}" for r in range(w)], "y": loads.sum(axis=0),
                     "marker": {"color": color}})  # fmt: skip
    probe = prediction_of(view.output_dir, w, recipe)
    slowest = {name: float(load.sum()) for name, load in loads_of_arms(plan, recipe, w, quadratic).items()}
    rate, rows = None if probe is None else probe["seconds_per_token"], []
    for name, arm in arms_of(plan, recipe.train.seed).items():
        number = int(arm.kept.sum())
        seconds = "" if rate is None else duration(slowest[name] * rate)
        rows.append([name, number, int(arm.num_tokens[arm.kept].sum()), steps_text(number, recipe.train),
                     f"{slowest[name] / slowest['full']:.1%}", seconds])  # fmt: skip
    told = "predicted by the probe" if probe else "predicted (unknown: run --dry_run --probe 5 before)"
    stages = ", ".join(f"{name} {duration(s) if s else 'reused'}" for name, s in view.prepared.seconds.items())
    return join([
        paragraph(f"So far: {stages}."),
        table(["training on", "samples", "tokens an epoch", "steps", "computing, of full", told], rows, text=(3,)),
        paragraph("Full data and random are dealt to the ranks by tokens, CluSTER as the recipe says.", "soft"),
        paragraph(f"Tokens that each of {w} ranks computes over the whole training, in tokens of a short sample:"),
        figure(bars, height=280, barmode="group", showlegend=True, yaxis={"title": {"text": "computed tokens"}}),
        *(paragraph(line, "soft") for line in lines),
    ])  # fmt: skip


def _rows(view: View) -> Html:
    m, plan = view.manifest, view.plan
    number = {name: row for row, name in enumerate(plan.ids)}
    parts = [preformatted("\n".join(view.prepared.tokens.notes))] if view.prepared.tokens.notes else []
    excluded = {kind: count for kind, count in m["excluded"].items() if count}
    told = ", ".join(f"{kind} {count}" for kind, count in excluded.items())
    parts.append(paragraph(f"Left out beforehand: {told or 'nothing'}."))
    pairs = m.get("near_duplicates", {}).get("closest", [])
    if pairs:
        d = m["near_duplicates"]
        parts.append(details(
            f"Near-duplicates: {d['num_repeated']} samples repeat an earlier one (cosine of proxies {d['min_cosine']:g} or "
            f"more); the {min(len(pairs), _ROWS)} closest pairs",
            table(["cosine", "one", "other"], [[f"{cosine:.4f}", view.text(number[a]), view.text(number[b])]
                                               for a, b, cosine in pairs[:_ROWS]], text=(1, 2)),
        ))  # fmt: skip
    extreme = m.get("extreme_rows", [])
    if extreme:
        rows = [
            [f"{row['times_spread']:.2f}", row["cluster"], "kept" if row["kept"] else "left out",
             row["num_supervised_tokens"], "" if row["loss"] is None else f"{row['loss']:.2f}", view.text(number[row["id"]])]
            for row in extreme[:_ROWS]
        ]  # fmt: skip
        header = ["distance / spread", "cluster", "", "supervised tokens", "loss", "text"]
        parts.append(details(f"The {len(rows)} most extreme rows: broken ones come first", table(header, rows, text=(5,))))
    return join(parts)


def _provenance(view: View) -> Html:
    m = view.manifest
    values = {
        "page made by": _this_version(), **m["provenance"], "plan": view.plan.hash,
        **{f"selection.{k}": v for k, v in m["selection"].items()},
        **{f"version of {k}": v for k, v in m["versions"].items()},
    }  # fmt: skip
    return join([
        preformatted(_command()),
        table(["what", "value"], [[name, str(value)] for name, value in values.items()], text=(1,)),
    ])


def _command() -> str:
    """What was typed, and where, without what launchers add; on each node, where there are several."""
    ranks, words = int(os.environ.get("WORLD_SIZE", 1)), []
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", ranks)))
    for word, before in zip(sys.argv, ["", *sys.argv], strict=False):
        if not word.startswith(("--local_rank", "--stop_file")) and before != "--stop_file":
            words.append(word)
    launcher = ["deepspeed", "--num_gpus", str(on_node)] if ranks > 1 else ["python"]
    launcher += ["--num_nodes", str(ranks // on_node)] if ranks > on_node else []
    return f"cd {shlex.quote(os.getcwd())}\n{shlex.join([*launcher, *words])}"


def _this_version() -> str:
    """Of cluster-ds, with the commit of a checkout."""
    checkout, commit = Path(__file__).resolve().parents[2], ""
    if (checkout / ".git").exists():
        asked = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
        try:
            commit = subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):  # no git here
            pass
    return f"cluster-ds {__version__}" + (f", commit {commit}" if commit else "")
