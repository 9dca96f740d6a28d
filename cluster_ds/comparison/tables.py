"""results.jsonl -> the tables of a comparison, in Markdown and as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..files import read_json, write_text
from ..report.page import COLORS, Html, Trace, document, figure, join, paragraph, table
from ..run_log import read_lines
from .arms import ARMS, REFERENCE
from .intervals import Difference, paired_difference
from .running import RESULTS

Table = tuple[str, list[str], list[list[str]]]  # title, header, rows
_ORDER = ["untrained", *ARMS]
_NOTES = (
    "Losses are nats, means over held-out samples, then over seeds, with the standard deviation over seeds. The validation "
    "half of the held-out rows may decide (a sweep's best, LESS's scores); the test half reports.",
    f"Differences are from {REFERENCE}, paired by test example and seed, with a 95 % interval (two crossed random effects); "
    "a true difference as large as the detectable one would put zero outside of the interval with a probability of 80 %. "
    "What is seen below it is called no difference, whatever the table's last digits say.",
    "Seeds go into clustering, draws and training. IFD's, LESS's and S2L's scores are made once, with seed 0: their "
    "intervals do not speak of other warm-ups or other small models.",
    "Selection seconds are what an arm's selection takes by itself: proxies and clusters count for every arm of CluSTER's, "
    "scores for each of the others. Samples and tokens are those trained on, over all epochs.",
)


def write_tables(output_dir: Path) -> None:
    """comparison.md and comparison.html from all finished runs."""
    entries = read_lines(output_dir / RESULTS)
    if not entries:
        return
    tables = tables_of(entries, output_dir)
    write_text(output_dir / "comparison.md", markdown(tables))
    write_text(output_dir / "comparison.html", page(tables, entries))


def tables_of(entries: list[dict[str, Any]], output_dir: Path) -> list[Table]:
    """A table of each point of a sweep, losses by source, benchmark scores, and what a sweep's validation half decides."""
    points = list(dict.fromkeys(e["point"] for e in entries))
    tables: list[Table] = []
    for point in points:
        here = [e for e in entries if e["point"] == point]
        tables.append(_main_table(here, point))
        if len({name for e in here for name in e["sources"]}) > 1:
            tables.append(_source_table(here, point))
        scores = _score_table(here, point, output_dir)
        if scores is not None:
            tables.append(scores)
    if len(points) > 1:
        tables.append(_sweep_table(entries, points))
    return tables


def differences(entries: list[dict[str, Any]]) -> dict[str, Difference]:
    """Of each arm of one point from the reference, over the seeds that both have; {} without the reference."""
    by_arm = _by_arm(entries)
    reference = {e["seed"]: e["test_losses"] for e in by_arm.get(REFERENCE, [])}
    out = {}
    for arm, runs in by_arm.items():
        if arm == "untrained":
            continue
        paired = [(e["test_losses"], reference[e["seed"]]) for e in runs if e["seed"] in reference]
        if arm != REFERENCE and paired:
            mine, theirs = (np.array(losses) for losses in zip(*paired, strict=True))
            out[arm] = paired_difference(mine, theirs)
    return out


def markdown(tables: Sequence[Table]) -> str:
    """The tables and what their numbers mean."""
    parts = ["# Comparison", *_NOTES]
    for title, header, rows in tables:
        lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def page(tables: Sequence[Table], entries: list[dict[str, Any]]) -> str:
    """One self-contained HTML file."""
    lead = join([*(paragraph(note, "soft") for note in _NOTES), _picture(entries)])
    return document("Comparison", lead, [(title, table(header, rows)) for title, header, rows in tables])


def _picture(entries: list[dict[str, Any]]) -> Html:
    """The differences with their intervals; nothing where there are none."""
    points = list(dict.fromkeys(e["point"] for e in entries))
    found = [(p, a, d) for p in points for a, d in differences([e for e in entries if e["point"] == p]).items()]
    if not found:
        return Html("")
    traces: list[Trace] = []
    for verdict, color in (("no difference seen", "#8a8a96"), ("lower", COLORS[2]), ("higher", COLORS[4])):
        mine = [(", ".join(filter(None, (arm, point))), d) for point, arm, d in found if d.verdict == verdict]
        if mine:
            error = {"type": "data", "symmetric": False, "array": [d.high - d.mean for _, d in mine],
                     "arrayminus": [d.mean - d.low for _, d in mine]}  # fmt: skip
            traces.append({
                "type": "scatter", "mode": "markers", "name": verdict, "x": [d.mean for _, d in mine],
                "y": [name for name, _ in mine], "error_x": error, "marker": {"color": color, "size": 9},
            })  # fmt: skip
    names = [", ".join(filter(None, (arm, point))) for point, arm, _ in reversed(found)]
    return figure(
        traces, height=110 + 26 * len(found), showlegend=True,
        xaxis={"title": {"text": f"test loss minus {REFERENCE}'s, nats, with 95 % intervals"}},
        yaxis={"type": "category", "categoryorder": "array", "categoryarray": names},
    )


def _main_table(entries: list[dict[str, Any]], point: str) -> Table:
    header = [
        "arm", "seeds", "kept", "samples", "supervised tokens", "tokens", "steps", "selection s", "training s", "total s",
        "validation", "test", f"minus {REFERENCE}", "95 %", "detectable", "",
    ]
    found, rows = differences(entries), []
    for arm, runs in _by_arm(entries).items():
        if arm == "untrained":
            losses = [_mean_std([e[half]["sample_mean"] for e in runs]) for half in ("validation", "test")]
            rows.append([arm, *[""] * 9, *losses, "", "", "", ""])
            continue
        counted = ("kept", "num_samples", "num_supervised_tokens", "num_tokens", "steps")
        known = [e["cost"]["seconds"] for e in runs if e["cost"]["seconds"] is not None]
        selection = float(np.mean(known)) if known else float("nan")
        training = float(np.mean([e["training_seconds"] for e in runs]))
        d = found.get(arm)
        told = ["", "", "", ""] if d is None else [
            f"{d.mean:+.4f}", f"{d.low:+.4f} to {d.high:+.4f}", f"{d.detectable:.4f}", d.verdict
        ]
        rows.append([
            arm, str(len(runs)), *(f"{np.mean([e[name] for e in runs]):.0f}" for name in counted),
            *("?" if np.isnan(s) else f"{s:.1f}" for s in (selection, training, selection + training)),
            *(_mean_std([e[half]["sample_mean"] for e in runs]) for half in ("validation", "test")), *told,
        ])
    matched = entries[-1]["match"]
    return f"Arms, equal in {matched}" + (f": {point}" if point else ""), header, rows


def _source_table(entries: list[dict[str, Any]], point: str) -> Table:
    sources = sorted({name for e in entries for name in e["sources"]})
    rows = [
        [arm, *(_mean_std([e["sources"][name] for e in runs]) + _of_source(entries, arm, name) for name in sources)]
        for arm, runs in _by_arm(entries).items()
    ]
    title = f"Test loss by source, in brackets the interval of the difference from {REFERENCE}"
    return title + (f": {point}" if point else ""), ["arm", *sources], rows


def _of_source(entries: list[dict[str, Any]], arm: str, source: str) -> str:
    """The interval of the difference on one source's examples."""
    cut = []
    for entry in entries:
        mine = [loss for loss, name in zip(entry["test_losses"], entry["test_sources"], strict=True) if name == source]
        cut.append({**entry, "test_losses": mine})
    if len(cut[0]["test_losses"]) < 2:
        return ""
    d = differences(cut).get(arm)
    return "" if d is None else f" ({d.low:+.4f} to {d.high:+.4f})"


def _score_table(entries: list[dict[str, Any]], point: str, output_dir: Path) -> Table | None:
    """What the scripts in eval/ have left beside the runs' models; None where they were not run.

    Of a benchmark that was tried with --limit as well the score over most questions counts; other numbers of questions are
    other columns.
    """
    scores: dict[str, dict[str, list[float]]] = {}
    for entry in entries:
        best: dict[str, dict[str, Any]] = {}
        for file in sorted((output_dir / entry["folder"] / "eval").glob("*/results.json")) if "folder" in entry else []:
            for name, score in read_json(file)["scores"].items():
                best[name] = max(best.get(name, score), score, key=lambda s: s["n"])
        for name, score in best.items():
            column = scores.setdefault(f"{name} (n = {score['n']})", {})
            column.setdefault(entry["arm"], []).append(100 * float(score["value"]))
    if not scores:
        return None
    arms = [arm for arm in _by_arm(entries) if any(arm in found for found in scores.values())]
    rows = [[arm, *(_mean_std(found.get(arm, []), 1) for found in scores.values())] for arm in arms]
    return "Benchmarks, %" + (f": {point}" if point else ""), ["arm", *scores], rows


def _sweep_table(entries: list[dict[str, Any]], points: list[str]) -> Table:
    """Which point the validation half prefers for each arm, and what the test half says of it."""
    rows = []
    for arm, runs in _by_arm(entries).items():
        if arm == "untrained":
            continue
        means = {p: np.mean([e["validation"]["sample_mean"] for e in runs if e["point"] == p]) for p in points
                 if any(e["point"] == p for e in runs)}
        best = min(means, key=lambda p: float(means[p]))
        test = _mean_std([e["test"]["sample_mean"] for e in runs if e["point"] == best])
        rows.append([arm, *(f"{means[p]:.4f}" if p in means else "" for p in points), best, test])
    return "Validation loss over the sweep, and the test loss where it is least", ["arm", *points, "least at", "test"], rows


def _by_arm(entries: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs of each arm, in the order of ARMS, of a run written twice the last."""
    once = {(e["point"], e["arm"], e["seed"]): e for e in entries}
    arms = [arm for arm in _ORDER if any(e["arm"] == arm for e in entries)]
    return {arm: [e for e in once.values() if e["arm"] == arm] for arm in arms}


def _mean_std(values: list[float], digits: int = 4) -> str:
    if not values:
        return ""
    std = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{std}"
