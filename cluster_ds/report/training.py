"""The training report: how a run went, from what it wrote down. Shapes: S steps, K clusters, W ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..dry_run import duration, prediction_rows
from ..estimate import loads_of_arms
from ..files import MANIFEST, read_json, size_text, write_text
from ..plan import Plan
from ..recipe import Recipe
from ..recipe_file import load_recipe
from ..run_log import read_lines
from ..shapes import quadratic_cost
from .page import COLORS, Html, Trace, details, document, facts, figure, join, paragraph, preformatted, table

NAME = "training.html"
_MOST_POINTS = 4_000  # of a curve
_SMOOTHED = 0.9  # what an exponential mean keeps of the steps before
_SPIKES = 20
_MOST_IN_HOVER = 12  # curves

Entries = list[dict[str, Any]]


def write_training_report(
    recipe: Recipe, plan: Plan, model_folder: Path, output_dir: Path, *, cut_short: str = ""
) -> Path | None:
    """Write the report of a run from its log; benchmark scores are in it once there are any.

    Args:
        recipe, plan, output_dir: of the run.
        model_folder: of the model that was trained, before or after.
        cut_short: why a run ended before its last step; such a one has no summary.
    Returns:
        the file, or None where the log is lost.
    """
    log, file = read_lines(output_dir / "log.jsonl"), output_dir / "summary.json"
    if not log:
        return None
    summary = read_json(file) if file.is_file() and not cut_short else {}
    first, last = log[0], log[-1]
    world_size = summary.get("world_size") or round(last["tokens_per_s"] / last["tokens_per_s_per_rank"])
    loads = loads_of_arms(plan, recipe, world_size, quadratic_cost(model_folder))
    ended = f"Cut short behind step {last['step']} of {len(loads['CluSTER'])}: {cut_short}."
    lead = join([
        *([paragraph(ended, "warn")] if cut_short else []),
        paragraph(f"{recipe.model.name_or_path}, {len(log)} steps on {world_size} ranks, ZeRO config "
                  f"{recipe.deepspeed.config}, {recipe.train.precision}, {recipe.train.optimizer}", "soft"),
        facts({
            "steps": len(log), "samples": f"{sum(e['num_samples'] for e in log):,}",
            "loss of the first step": f"{first['loss']:.4f}", "of the last": f"{last['loss']:.4f}",
            **_held_out_facts(summary), "steps took": duration(sum(e["seconds"] for e in log)),
        }),
    ])  # fmt: skip
    sections = [
        ("Loss", _losses(log, read_lines(output_dir / "held_out.jsonl"))),
        ("Learning rate and gradient norm", _gradients(log)),
        ("Speed", _speed(log)),
        ("Time, predicted and measured", _time(loads, summary, log)),
        ("Diagnostics", _diagnostics(log, read_lines(output_dir / "spikes.jsonl"))),
        ("Scores", _scores(output_dir)),
        ("Checkpoints and model", _files(output_dir, summary)),
        ("Recipe", details("with its defaults", preformatted(recipe.to_yaml()))),
    ]
    write_text(output_dir / NAME, document(f"Training: {recipe.name}", lead, sections))
    return output_dir / NAME


def rewrite_training_report(run: Path) -> Path | None:
    """The same of a finished run's folder, which has got new scores."""
    recipe = load_recipe(str(run / "recipe.yaml"))
    return write_training_report(recipe, Plan.read(run / "plan"), run / "model", run)


def _held_out_facts(summary: dict[str, Any]) -> dict[str, str]:
    before, after = summary.get("held_out_before"), summary.get("held_out_after")
    if not before or not after:
        return {}
    return {"held-out loss before": f"{before['sample_mean']:.4f}", "after": f"{after['sample_mean']:.4f}"}


def _losses(log: Entries, held_out: Entries) -> Html:
    losses = np.array([e["loss"] for e in log], dtype=float)
    traces = [
        _line(log, "loss", losses, "#9a9aa6", width=1), _line(log, f"smoothed ({_SMOOTHED})", _smooth(losses), COLORS[0]),
    ]
    if held_out:
        traces.append({"type": "scatter", "mode": "lines+markers", "name": "held-out", "x": [e["step"] for e in held_out],
                       "y": [e["sample_mean"] for e in held_out], "line": {"color": COLORS[4]}})  # fmt: skip
    k = len(log[0]["cluster_loss"])
    most = max(50, 4 * _MOST_POINTS // max(k, 4))
    by_cluster = [
        _line(log, f"cluster {c}", _smooth(np.array([_number(e["cluster_loss"][c]) for e in log])), COLORS[c % len(COLORS)],
              most=most) for c in range(k)
    ]  # fmt: skip
    text = "What is minimised: the weighted mean over the global batch, in nats. By cluster: its samples' unweighted mean."
    if len(log) > most:
        text += f" Curves show {min(len(log), _MOST_POINTS):,} of {len(log):,} steps, those by cluster {most:,}."
    return join([paragraph(text), _curves(traces, "loss"), _curves(by_cluster, f"loss by cluster, smoothed ({_SMOOTHED})")])


def _gradients(log: Entries) -> Html:
    norms = np.array([_number(e["grad_norm"]) for e in log])
    return join([
        _curves([_line(log, "learning rate", np.array([e["lr"] for e in log]), COLORS[2])], "learning rate", height=240),
        _curves([_line(log, "gradient norm", norms, COLORS[3])], "norm before clipping", height=240),
    ])


def _speed(log: Entries) -> Html:
    rates = np.array([e["tokens_per_s"] for e in log])
    skews = [
        _line(log, f"{name} skew", np.array([_number(e[key]) for e in log]), color)
        for name, key, color in (("predicted", "predicted_skew", "#9a9aa6"), ("measured", "skew", COLORS[1]))
    ]
    waited = sum(e["data_wait_s"] for e in log) / sum(e["seconds"] for e in log)
    mfu = [e["mfu"] for e in log if e["mfu"] is not None]
    told = f"{np.median(rates):.0f} tokens/s in the median step; waiting for data: {waited:.1%} of the time"
    told += f"; model FLOPs utilization {np.median(mfu):.1%}" if mfu else ""
    return join([
        paragraph(told + ". Skew: the slowest rank's time over the mean."),
        _curves([_line(log, "tokens/s", rates, COLORS[0])], "tokens/s, all ranks", height=260),
        _curves(skews, "skew", height=260),
    ])


def _time(loads: dict[str, np.ndarray], summary: dict[str, Any], log: Entries) -> Html:
    seconds = sum(e["seconds"] for e in log)
    stages = [[name, duration(s) if s else "reused"] for name, s in summary.get("seconds", {}).items()]
    rate = seconds / loads["CluSTER"][: len(log)].sum()  # early stopping ends before the schedule does
    rows = [[name, duration(load.sum() * rate), f"{load.sum() / loads['full'].sum():.1%}"] for name, load in loads.items()]
    parts = [
        *([table(["stage", "took, in this start"], stages)] if stages else []),
        paragraph("All steps would take, at the rate measured here, full data and random dealt to the ranks by tokens:"),
        table(["training on", "steps", "of full data"], rows),
    ]
    told = summary.get("prediction")
    if told is not None:
        parts.append(table(["", "predicted by the probe", "measured", "predicted / measured"], prediction_rows(told)))
    else:
        parts.append(paragraph("No probe was made before: --dry_run --probe 5 predicts times.", "soft"))
    return join(parts)


def _diagnostics(log: Entries, spikes: Entries) -> Html:
    parts = []
    looked = [e for e in log if e.get("gradient_diversity") is not None]
    if looked:
        diversity = np.array([e["gradient_diversity"] * e["num_gradients"] for e in looked])
        parts.append(_curves([_line(looked, "diversity", diversity, COLORS[2])], "diversity x number", height=240))
    else:
        parts.append(paragraph("Gradients were not compared: train.diagnose_every looks at them.", "soft"))
    compared = [e for e in looked if e["rank_cosine"] is not None]
    if compared:
        cosines = np.array([e["rank_cosine"] for e in compared])
        line = _line(compared, "cosine", cosines, COLORS[0])
        parts.append(paragraph("Cosine: the mean over pairs of ranks, of their gradients in the same step."))
        parts.append(_curves([line], "ranks' mean cosine", height=240))
    if spikes:
        rows = [[e["step"], f"{e['loss']:.4f}", f"{e['usual']:.4f}", ", ".join(s["id"] for s in e["samples"][:3])]
                for e in spikes[:_SPIKES]]  # fmt: skip
        header = ["step", "loss", "usual", "worst samples"]
        parts.append(details(f"{len(spikes)} spikes of the loss", table(header, rows, text=(3,))))
    else:
        parts.append(paragraph("No step's loss was far above those before."))
    return join(parts)


def _scores(output_dir: Path) -> Html:
    rows = []
    for file in sorted((output_dir / "eval").glob("*/results.json")):
        for name, score in read_json(file)["scores"].items():
            bounds = score.get("interval_95")
            interval = " to ".join(f"{100 * bound:.1f}" for bound in bounds) if bounds else ""
            rows.append([name, f"{100 * score['value']:.1f}", interval, score.get("n", ""), file.parent.name])
    if not rows:
        return paragraph("None yet: eval/humaneval.sh, eval/mbpp.sh and eval/medqa.sh score the model and put the "
                         "scores here.", "soft")  # fmt: skip
    return table(["benchmark", "%", "95 % interval", "problems", "in eval/"], rows)


def _files(output_dir: Path, summary: dict[str, Any]) -> Html:
    rows = []
    for manifest in sorted(output_dir.glob(f"checkpoints/*/{MANIFEST}")):
        files = [p for p in manifest.parent.rglob("*") if p.is_file()]
        rows.append([manifest.parent.name, size_text(sum(p.stat().st_size for p in files))])
    parts = [table(["checkpoint", "size"], rows)] if rows else []
    return join([*parts, paragraph(f"The model: {summary.get('model', 'none yet')}")])


def _line(log: Entries, name: str, values: np.ndarray, color: str, width: int = 2, most: int = _MOST_POINTS) -> Trace:
    """A curve over steps, of at most `most` of them."""
    chosen = np.unique(np.linspace(0, len(log) - 1, min(len(log), most)).astype(int))
    steps = [log[i]["step"] for i in chosen]
    return {"type": "scatter", "mode": "lines" if len(log) > 1 else "markers", "name": name, "x": steps, "y": values[chosen],
            "line": {"color": color, "width": width}}  # fmt: skip


def _curves(traces: list[Trace], title: str, height: int = 340) -> Html:
    hover = "x unified" if len(traces) < _MOST_IN_HOVER else "closest"
    return figure(
        traces, height=height, showlegend=len(traces) > 1, hovermode=hover, xaxis={"title": {"text": "step"}},
        yaxis={"title": {"text": title}, "exponentformat": "e"},
    )


def _smooth(values: np.ndarray) -> np.ndarray:
    """Exponential mean without a bias toward its start; steps without a value change nothing."""
    out, total, weight = np.full(len(values), np.nan), 0.0, 0.0
    for i, value in enumerate(values):
        if np.isfinite(value):
            total, weight = _SMOOTHED * total + (1 - _SMOOTHED) * value, _SMOOTHED * weight + (1 - _SMOOTHED)
        if weight:
            out[i] = total / weight
    return out


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
