"""Results of several runs -> one Markdown table, with mean and standard deviation over the runs of a label."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from ..files import read_json, write_text
from .results import RESULTS


def report(runs: list[str], output: Path | None = None) -> str:
    """Merge the results of runs.

    Args:
        runs: "[LABEL=]FOLDER"; without a label it is the recipe's name. Every results.json below FOLDER is read.
        output: a file for the table.
    Returns:
        the table, which is printed too.
    Raises:
        ValueError: if a folder holds no results, or runs of one label were scored differently.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for text in runs:
        label, equals, folder = text.rpartition("=")
        results = _read(Path(folder).expanduser())
        name = label if equals else next((r["recipe"]["name"] for r in results if r.get("recipe")), Path(folder).name)
        groups.setdefault(name, []).append(_merge(results, folder))
    names = list(dict.fromkeys(score for group in groups.values() for run in group for score in run["scores"]))
    lines = [
        "| | runs | " + " | ".join(f"{name} (n = {_number(groups, name)})" for name in names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for label, group in groups.items():
        lines.append(f"| {label} | {len(group)} | " + " | ".join(_cell(group, name) for name in names) + " |")
    notes = [f"- {label}: {note}" for label, group in groups.items() for run in group for note in run["notes"]]
    table = "\n".join([*lines, "", *_legend(groups), *dict.fromkeys(notes)]) + "\n"
    print(table, end="")
    if output is not None:
        write_text(output, table)
    return table


def _read(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.rglob(RESULTS)) if folder.is_dir() else []
    if not files:
        raise ValueError(f"{folder} holds no {RESULTS}: run eval/run.py --recipe NAME, or the scripts in eval/, first")
    return [{**read_json(file), "file": str(file)} for file in files]


def _merge(results: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """The results of one run as one; a score that is there twice is refused."""
    scores: dict[str, Any] = {}
    for result in results:
        for name, score in result["scores"].items():
            if name in scores:
                raise ValueError(
                    f"{folder} holds {name} twice ({scores[name]['n']} and {score['n']} questions): name the folder of one"
                )
            scores[name] = score
    return {"scores": scores, "notes": [note for result in results for note in result.get("notes", [])]}


def _number(groups: dict[str, list[dict[str, Any]]], name: str) -> str:
    numbers = sorted({run["scores"][name]["n"] for group in groups.values() for run in group if name in run["scores"]})
    if len(numbers) > 1:
        raise ValueError(f"{name} was scored on {' and '.join(map(str, numbers))} questions: not comparable")
    return str(numbers[0])


def _cell(group: list[dict[str, Any]], name: str) -> str:
    values = [100 * run["scores"][name]["value"] for run in group if name in run["scores"]]
    if not values:
        return ""
    if len(values) > 1:
        return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}" + (
            f" ({len(values)} of {len(group)})" if len(values) < len(group) else ""
        )
    low, high = (100 * edge for edge in next(run for run in group if name in run["scores"])["scores"][name]["interval_95"])
    return f"{values[0]:.1f} [{low:.1f}, {high:.1f}]"


def _legend(groups: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = []
    if any(len(group) > 1 for group in groups.values()):
        lines.append("Several runs: mean ± sample standard deviation, in percent.")
    if any(len(group) == 1 for group in groups.values()):
        lines.append("One run: the score in percent with its 95 % interval over the questions.")
    return [*lines, ""] if lines else []
