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
        runs: "[LABEL=]FOLDER"; without a label it is the recipe's name, or the folder's. Every results.json below FOLDER is
            read. Under one label stand runs of one recipe that differ in their seeds alone.
        output: a file for the table.
    Returns:
        the table, which is printed too.
    Raises:
        ValueError: if a folder holds no results, or runs of one label were scored differently.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for text in runs:
        label, equals, folder = text.partition("=")
        if not equals or Path(text).expanduser().is_dir():  # a folder may be called ratio=0.5
            label, folder = "", text
        results = _read(Path(folder).expanduser())
        name = label or next((r["recipe"]["name"] for r in results if r.get("recipe")), Path(folder).name)
        groups.setdefault(name, []).append(_merge(results, folder))
    for name, group in groups.items():
        _require_alike(name, group)
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
    found = []
    for file in files:
        try:
            result = read_json(file)
            result["scores"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}): run that evaluation again") from None
        found.append(result)
    return found


def _require_alike(name: str, group: list[dict[str, Any]]) -> None:
    """Refuse to average runs that are more than seeds of one thing."""
    for kind in ("recipe", "how"):
        values = [run[kind] for run in group]
        different = next((value for value in values if value != values[0]), None)
        if different is not None:
            keys = sorted(k for k in {**values[0], **different} if values[0].get(k) != different.get(k))
            raise ValueError(
                f"the runs called {name} differ in {', '.join(keys)}, so they are no seeds of one thing: give them labels, "
                "LABEL=FOLDER"
            )


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
    recipe = next((r["recipe"] for r in results if r.get("recipe")), None) or {}
    plain = {f"{s}.{k}": v for s, keys in recipe.items() if isinstance(keys, dict) for k, v in keys.items() if k != "seed"}
    how: dict[str, Any] = {}
    for result in results:
        generation = result.get("generation") or {}
        told = {k: generation.get(k) for k in ("max_new_tokens", "template")}
        told |= {"engine": result.get("engine"), "problems": (result.get("problems") or {}).get("md5")}
        how |= {f"{result.get('benchmark')} {k}": v for k, v in told.items()}
    notes = [note for result in results for note in result.get("notes", [])]
    return {"scores": scores, "notes": notes, "recipe": plain, "how": how}


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
