"""The training report: how a run went, from what it wrote down. Shapes: S steps, K clusters, W ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..dry_run import duration, training_seconds
from ..estimate import arms_of
from ..files import MANIFEST, read_json, size_text, write_text
from ..prepare import Prepared
from ..recipe import Recipe
from ..run_log import read_lines
from ..shapes import quadratic_cost
from .page import COLORS, Html, Trace, details, document, facts, figure, join, paragraph, preformatted, table

NAME = "training.html"
_MOST_POINTS = 4_000  # of a curve
_SMOOTHED = 0.9  # what an exponential mean keeps of the steps before
_SPIKES = 20

Entries = list[dict[str, Any]]


def write_training_report(recipe: Recipe, prepared: Prepared, output_dir: Path, world_size: int) -> Path:
    """Write the report of a finished run from its log; benchmark scores are in it once eval/ has been run.

    Args:
        recipe, prepared, output_dir: of the run.
        world_size: W that it ended with.
    """
    log, summary = read_lines(output_dir / "log.jsonl"), read_json(output_dir / "summary.json")
    first, last = log[0], log[-1]
    lead = join([
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
        ("Time, predicted and measured", _time(recipe, prepared, summary, log, world_size)),
        ("Diagnostics", _diagnostics(log, read_lines(output_dir / "spikes.jsonl"))),
        ("Scores", _scores(output_dir)),
        ("Checkpoints and model", _files(output_dir, summary)),
        ("Recipe", details("with its defaults", preformatted(recipe.to_yaml()))),
    ]
    write_text(output_dir / NAME, document(f"Training: {recipe.name}", lead, sections))
    return output_dir / NAME


def _held_out_facts(summary: dict[str, Any]) -> dict[str, str]:
    before, after = summary["held_out_before"], summary["held_out_after"]
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
    by_cluster = [
        _line(log, f"cluster {c}", _smooth(np.array([_number(e["cluster_loss"][c]) for e in log])), COLORS[c % len(COLORS)])
        for c in range(k)
    ]
    text = "What is minimised: the weighted mean over the global batch, in nats. By cluster: its samples' unweighted mean."
    return join([paragraph(text), _curves(traces, "loss"), _curves(by_cluster, f"loss by cluster, smoothed ({_SMOOTHED})")])


def _gradients(log: Entries) -> Html:
    norms = np.array([_number(e["grad_norm"]) for e in log])
    return join([
        _curves([_line(log, "learning rate", np.array([e["lr"] for e in log]), COLORS[2])], "learning rate", height=240),
        _curves([_line(log, "gradient norm", norms, COLORS[3])], "gradient norm before clipping", height=240),
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


def _time(recipe: Recipe, prepared: Prepared, summary: dict[str, Any], log: Entries, world_size: int) -> Html:
    seconds = sum(e["seconds"] for e in log)
    stages = [[name, duration(s) if s else "reused"] for name, s in summary["seconds"].items()]
    measured = {"world_size": world_size, "quadratic_cost": quadratic_cost(prepared.model_folder), "seconds_per_token": 1.0}
    arms = arms_of(prepared.plan, recipe.train.seed)
    units = {name: training_seconds(arm, recipe, measured) for name, arm in arms.items()}
    share = len(log) / max(1, summary["steps"])
    rate = seconds / (units["CluSTER"] * share)
    rows = [[name, duration(value * rate), f"{value / units['full']:.1%}"] for name, value in units.items()]
    parts = [
        table(["stage", "took"], stages),
        paragraph("All steps on other data would take, at the rate measured here:"),
        table(["training on", "steps", "of full data"], rows),
    ]
    told = summary.get("prediction")
    if told is not None:
        compared = [
            [what, duration(told[f"{what}_predicted"]), duration(told[f"{what}_measured"]) if told[f"{what}_measured"] else
             "reused", f"{told[f'{what}_predicted'] / told[f'{what}_measured']:.2f} x" if told[f"{what}_measured"] else ""]
            for what in ("steps", "extraction")
        ]  # fmt: skip
        parts.append(table(["", "predicted by the probe", "measured", ""], compared))
    else:
        parts.append(paragraph("No probe was made before: --dry_run --probe 5 predicts times.", "soft"))
    return join(parts)


def _diagnostics(log: Entries, spikes: Entries) -> Html:
    parts = []
    looked = [e for e in log if e.get("rank_cosine") is not None]
    if looked:
        cosines = np.array([e["rank_cosine"] for e in looked])
        diversity = np.array([e["gradient_diversity"] * e["num_gradients"] for e in looked])
        parts += [
            _curves([_line(looked, "cosine", cosines, COLORS[0])], "mean cosine of the ranks' gradients", height=240),
            _curves([_line(looked, "diversity", diversity, COLORS[2])], "gradient diversity x their number", height=240),
        ]
    else:
        parts.append(paragraph("train.diagnose_every was not set, so the ranks' gradients were not compared.", "soft"))
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
            rows.append([name, f"{100 * score['value']:.1f}", interval, score.get("n", "")])
    if not rows:
        return paragraph("None yet: eval/humaneval.sh, eval/mbpp.sh and eval/medqa.sh score the model, and the same "
                         "training command again puts the scores here.", "soft")  # fmt: skip
    return table(["benchmark", "%", "95 % interval", "problems"], rows)


def _files(output_dir: Path, summary: dict[str, Any]) -> Html:
    rows = []
    for manifest in sorted(output_dir.glob(f"checkpoints/*/{MANIFEST}")):
        files = [p for p in manifest.parent.rglob("*") if p.is_file()]
        rows.append([manifest.parent.name, size_text(sum(p.stat().st_size for p in files))])
    model = paragraph(f"The model: {summary['model']}")
    return join([table(["checkpoint", "size"], rows), model]) if rows else model


def _line(log: Entries, name: str, values: np.ndarray, color: str, width: int = 2) -> Trace:
    """A curve over steps, of at most `_MOST_POINTS` of them."""
    chosen = np.unique(np.linspace(0, len(log) - 1, min(len(log), _MOST_POINTS)).astype(int))
    steps = [log[i]["step"] for i in chosen]
    return {"type": "scatter", "mode": "lines" if len(log) > 1 else "markers", "name": name, "x": steps, "y": values[chosen],
            "line": {"color": color, "width": width}}  # fmt: skip


def _curves(traces: list[Trace], title: str, height: int = 340) -> Html:
    return figure(
        traces, height=height, showlegend=len(traces) > 1, hovermode="x unified", xaxis={"title": {"text": "step"}},
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
