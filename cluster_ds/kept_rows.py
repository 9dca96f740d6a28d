"""Beside the stages: a plan -> the rows it keeps, for other trainers, in their original columns or in a format of theirs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .files import commit_file, read_json, write_json, write_text
from .json_values import Number
from .plan import Plan
from .prepare import train_sources
from .recipe import Recipe
from .records import Record, read_records
from .sources import Unreadable, find_files, read_rows
from .templates import user_text

OURS = ("sample_id", "cluster", "weight", "distance")
_EQUAL = 0.05  # spread of weights over their mean that rounded proportional quotas leave
_SHAREGPT_TAGS = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "system_tag": "system", "observation_tag": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """The kept rows of a plan, in the order of the data.

    Attributes:
        name: of the recipe.
        sources: of each source what it is read from: path, revision, split, subset, and its files in order.
        records: n kept samples as they are trained on.
        values: n rows with their original columns.
        ours: n rows with what the plan says of each.
        weights: float64 [n].
        notes: what a reader of the export should know.
    """

    name: str
    sources: dict[str, dict[str, Any]]
    records: list[Record]
    values: list[dict[str, Any]]
    ours: list[dict[str, Any]]
    weights: np.ndarray
    notes: list[str]


def kept_rows(recipe: Recipe, plan: Plan) -> Kept:
    """Read the data again and take what the plan keeps.

    Args:
        recipe: that the plan was made with.
        plan: says what is kept; of one that draws anew in every epoch, the first epoch's samples.
    Raises:
        ValueError: if the data do not hold every kept sample any more.
    """
    sources = train_sources(recipe)
    records, _ = read_records(sources, recipe.data.max_bad_fraction)
    place = {name: i for i, name in enumerate(plan.ids)}
    records = [record for record in records if record.id in place and plan.kept[place[record.id]]]
    number = int(plan.kept.sum())
    if len(records) != number:
        raise ValueError(
            f"{number - len(records)} of {number} kept samples are not in the data any more: give the recipe and the files "
            "that the plan was made with"
        )
    read: dict[str, dict[str, Any]] = {}
    contents = {}
    for name, source in sources.items():
        how: dict[str, Any] = {"revision": source.revision, "split": source.split, "subset": source.subset}
        contents[name] = read_rows(source.path, **how)[0]
        read[name] = {"path": source.path, **how, "files": [file for file, _ in find_files(source.path, **how)[0]]}
    values, notes = _columns([contents[record.source][record.row].value for record in records])
    said = _said(plan, records, [place[record.id] for record in records], len(sources) > 1)
    if plan.redraw_seed is not None:
        notes.append("the plan draws other samples in every epoch; these are the first epoch's")
    prefix = ""
    while any(f"{prefix}{name}" in value for value in values for name in said[0]):
        prefix += "cluster_ds_"
    if prefix:
        notes.append(f"the data have columns of the plan's names: the plan's are called {prefix}weight and so on")
    ours = [{f"{prefix}{name}": value for name, value in row.items()} for row in said]
    return Kept(recipe.name, read, records, values, ours, plan.weight[[place[record.id] for record in records]], notes)


def _columns(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows' columns as JSON has them, and what is left out."""
    unreadable = sorted({column for row in rows for column, cell in row.items() if isinstance(cell, Unreadable)})
    notes = [f"columns {', '.join(unreadable)} are of a kind that cannot be written as text: left out"] if unreadable else []
    return [{c: _plain(cell) for c, cell in row.items() if c not in unreadable} for row in rows], notes


def _said(plan: Plan, records: list[Record], places: list[int], with_source: bool) -> list[dict[str, Any]]:
    """What the plan says of each record."""
    out = []
    for record, i in zip(records, places, strict=True):
        distance = None if math.isnan(plan.distance[i]) else float(plan.distance[i])
        row = {"sample_id": record.id, "cluster": int(plan.cluster[i]), "weight": float(plan.weight[i])}
        out.append({**row, "distance": distance, **({"source": record.source} if with_source else {})})
    return out


def weights_note(kept: Kept, reads_weights: bool) -> str | None:
    """What becomes of the weights in another trainer; None where all are equal, so that nothing is lost.

    Args:
        kept: the rows.
        reads_weights: whether the format at least carries them.
    """
    weights = kept.weights
    if np.ptp(weights) < _EQUAL * weights.mean():
        return None
    spread = f"weights go from {weights.min():.3f} to {weights.max():.3f}"
    remedy = (
        "multiply each sample's mean token loss by its weight, or select with selection.quota=proportional, which needs no "
        "weights (selection.choice=random has no bias either)"
    )
    if reads_weights:
        return f"{spread}: a trainer that does not read the weight column applies the method only half: {remedy}"
    return f"WARNING: the target reads no sample weights, so the method is only half applied: {spread}; {remedy}"


def write_jsonl(kept: Kept, path: Path) -> list[Path]:
    """One JSON object a line."""
    rows = [{**value, **said} for value, said in zip(kept.values, kept.ours, strict=True)]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return [path]


def write_parquet(kept: Kept, path: Path) -> list[Path]:
    """A table; a column that a source lacks is null there.

    Raises:
        ValueError: if a column holds values of several types.
    """
    rows = [{**value, **said} for value, said in zip(kept.values, kept.ours, strict=True)]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    arrays = {}
    for column in columns:
        try:
            arrays[column] = pa.array([row.get(column) for row in rows])
        except (pa.ArrowException, OverflowError) as error:
            raise ValueError(f"column {column} has no one type ({error}): export --to jsonl") from None
    try:
        with commit_file(path) as part:
            pq.write_table(pa.table(arrays), part)
    except pa.ArrowException as error:  # e.g. objects without any field
        raise ValueError(f"Parquet cannot hold these columns ({error}): export --to jsonl") from None
    return [path]


def write_indices(kept: Kept, path: Path) -> list[Path]:
    """Row numbers from 0 over the files of each source in their order, all rows counted, for `datasets.Dataset.select`."""
    out: dict[str, Any] = {}
    for source, read in kept.sources.items():
        mine = [i for i, record in enumerate(kept.records) if record.source == source]
        said = {name: [kept.ours[i][name] for i in mine] for name in (kept.ours[0] if kept.ours else ())}
        out[source] = {**read, "indices": [kept.records[i].row for i in mine], **said}
    write_json(path, out)
    return [path]


def write_llamafactory(kept: Kept, folder: Path) -> list[Path]:
    """A data file and its entry in dataset_info.json, which is added to what is there.

    Prompts are those that the recipe trains on. Rows of one question and one answer become "alpaca", others "sharegpt".
    """
    name = f"cluster_ds_{kept.name}"
    simple = all([role for role, _ in record.turns if role != "system"] == ["user", "assistant"] for record in kept.records)
    entry: dict[str, Any] = {"file_name": f"{name}.json"}
    rows: list[dict[str, Any]] = []
    for record, said in zip(kept.records, kept.ours, strict=True):
        turns = dict(record.turns)
        if simple:
            row: dict[str, Any] = {"instruction": turns["user"], "input": record.context, "output": turns["assistant"],
                                   "system": turns.get("system", "")}  # fmt: skip
        else:
            first = next(i for i, (role, _) in enumerate(record.turns) if role == "user") if record.context else None
            row = {"messages": [
                {"role": role, "content": user_text(text, record.context) if i == first else text}
                for i, (role, text) in enumerate(record.turns)
            ]}  # fmt: skip
        rows.append({**row, **said})
    if simple:
        columns = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
        entry["columns"] = columns
    else:
        entry |= {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": _SHAREGPT_TAGS}
    folder.mkdir(parents=True, exist_ok=True)
    path, listed = folder / f"{name}.json", folder / "dataset_info.json"
    try:
        others = read_json(listed) if listed.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{listed} is not valid JSON ({error}): mend it, or choose another --output") from None
    if not isinstance(others, dict):
        raise ValueError(f"{listed} holds no JSON object of data sets: mend it, or choose another --output")
    write_json(path, rows)
    write_json(listed, {**others, name: entry})
    return [path, listed]


# target -> how it is written, its default name, whether it carries weights to a trainer that may read them
TARGETS: dict[str, tuple[Callable[[Kept, Path], list[Path]], str, bool]] = {
    "jsonl": (write_jsonl, "kept.jsonl", True), "parquet": (write_parquet, "kept.parquet", True),
    "indices": (write_indices, "kept_indices.json", True), "llamafactory": (write_llamafactory, "llamafactory", False),
}  # fmt: skip


def _plain(value: Any) -> Any:
    """A cell as JSON has it: what is not finite is null, bytes that are no text become U+FFFD, other types their text."""
    if isinstance(value, Number):
        return int(value) if value.lstrip("-").isdigit() else _plain(float(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in value)
    if isinstance(value, dict):
        return {name: _plain(cell) for name, cell in value.items()}
    if isinstance(value, list):
        return [_plain(cell) for cell in value]
    return value if value is None or isinstance(value, (bool, int)) else str(value)
