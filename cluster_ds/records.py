"""Stage 1a: rows of any source -> Record(id, turns, context); bad rows are counted and named.

Local files are read here rather than by a table library, because a column's type must never be guessed from other rows:
"007" stays "007", a file with a byte order mark gives the same records, and only LF separates JSON lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .templates import EMPTY_INPUTS, user_text

# format -> our field -> the column it is read from
FORMATS: dict[str, dict[str, str]] = {
    "oss_instruct": {"instruction": "problem", "response": "solution"},
    "instruction_response": {"instruction": "instruction", "input": "input", "response": "response"},
    "alpaca": {"instruction": "instruction", "input": "input", "response": "output"},
    "messages": {"messages": "messages"},
}
OSS_INSTRUCT_PREFIX = "Write a solution to the following coding problem:\n"  # magicoder's preprocess_data.py
_FILE_SUFFIXES = (".json", ".jsonl", ".gz", ".csv", ".parquet", ".arrow", ".txt")
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Record:
    """One sample as text.

    `id` is a hash of the content plus the number of earlier rows with the same content, so that the same rows have the
    same ids in any file format and any order of distinct rows.
    """

    id: str
    turns: tuple[tuple[str, str], ...]  # (role, text)
    context: str = ""  # Alpaca's input column


@dataclass
class ReadReport:
    """What reading found; shown before anything else happens."""

    num_rows: int = 0
    num_empty: int = 0
    num_duplicates: int = 0
    num_unanswered: int = 0
    format: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    bad: dict[str, list[int]] = field(default_factory=dict)  # kind -> row numbers, counted from 1

    @property
    def num_bad(self) -> int:
        """Rows that could not be read."""
        return sum(len(rows) for rows in self.bad.values())

    def lines(self) -> list[str]:
        """The report as text, one finding a line."""
        mapping = ", ".join(f"{ours} <- {column}" for ours, column in self.columns.items())
        out = [f"{self.num_rows} rows read as {self.format} ({mapping})"]
        if self.num_empty:
            out.append(f"{self.num_empty} rows excluded: empty response")
        if self.num_duplicates:
            out.append(f"{self.num_duplicates} rows repeat an earlier row; they are kept")
        if self.num_unanswered:
            out.append(f"{self.num_unanswered} turns behind the last answer left out")
        for kind, rows in self.bad.items():
            shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
            out.append(f"{len(rows)} bad rows: {kind} (rows {shown})")
        return out


class BadRow(ValueError):
    """A row that cannot become a record; the message is its kind."""


def read_records(
    source: str,
    *,
    revision: str | None = None,
    split: str = "train",
    format: str = "auto",
    columns: dict[str, str] | None = None,
    max_bad_fraction: float = 0.01,
) -> tuple[list[Record], ReadReport]:
    """Read every row of a source.

    Args:
        source: a local .json or .jsonl file, or a data set's hub id.
        revision: of a hub data set.
        split: of a hub data set.
        format: one of FORMATS, or "auto" to detect it by the columns.
        columns: our field -> the source's column, where the names differ.
        max_bad_fraction: unreadable rows that are tolerated; rows with an empty response do not count.

    Returns:
        the usable records in the source's order, and the report.

    Raises:
        ValueError: no such source, unknown columns, no usable row, or too many bad rows.
    """
    rows = list(_read_file(Path(source)) if Path(source).is_file() else _read_hub(source, revision, split))
    num_rows = sum(row is not None for row in rows)
    if not num_rows:
        raise ValueError(f"{source} holds no rows")
    report = ReadReport(num_rows=num_rows)
    report.format, report.columns = _detect(source, rows, format, columns or {})
    records = _convert(rows, report)
    if report.num_bad > max_bad_fraction * report.num_rows:
        raise ValueError(
            f"{source}: {report.num_bad} of {report.num_rows} rows are bad, more than data.max_bad_fraction "
            f"{max_bad_fraction:g} allows: mend them, map other columns with data.columns, or raise the limit\n  "
            + "\n  ".join(report.lines())
        )
    if not records:
        raise ValueError(f"{source}: none of {report.num_rows} rows is usable\n  " + "\n  ".join(report.lines()))
    return records, report


def content_hash(records: Iterable[Record]) -> str:
    """Hash of the records' ids and contexts in order: what the tokens, and so everything after them, depend on."""
    digest = hashlib.blake2b(digest_size=16)
    for record in records:
        digest.update(record.id.encode() + b"\0" + record.context.encode() + b"\0")
    return digest.hexdigest()


def _read_file(path: Path) -> Iterator[Any]:
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if path.suffix == ".jsonl":
        for line in data.split(b"\n"):
            yield _parse(line) if line.strip() else None
    elif path.suffix == ".json":
        try:
            rows = _loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a JSON document in UTF-8: {error}; for JSON lines name it .jsonl") from None
        if not isinstance(rows, list):
            raise ValueError(f"{path} holds a JSON {_json_type(rows)}, not a list of rows")
        yield from rows
    else:
        raise ValueError(f"{path}: expected a .json or .jsonl file, not {path.suffix or 'a file without suffix'}")


def _parse(line: bytes) -> Any:
    """A JSON line's value, or the BadRow that says why there is none."""
    try:
        return _loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return BadRow("not UTF-8")
    except (ValueError, RecursionError):
        return BadRow("not JSON")


def _loads(text: str) -> Any:
    """Parse JSON; numbers keep their spelling, since an answer of 3.10 must not be learnt as 3.1."""
    return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)


def _read_hub(source: str, revision: str | None, split: str) -> Iterator[Any]:
    if Path(source).is_dir():
        raise ValueError(f"{source} is a folder: give a .json or .jsonl file")
    if Path(source).suffix in _FILE_SUFFIXES or source.startswith((".", "/", "~")):
        raise ValueError(f"data file {source} does not exist")
    import datasets

    try:
        yield from datasets.load_dataset(source, revision=revision, split=split)
    except Exception as error:  # the library raises a dozen types for "cannot have it"
        raise ValueError(f"data set {source!r} is neither a local file nor to be had from the hub: {error}") from error


def _detect(
    source: str, rows: list[Any], format: str, columns: dict[str, str]
) -> tuple[str, dict[str, str]]:
    """The format's name and its column map with the user's names in it."""
    present = {column for row in rows if isinstance(row, dict) for column in row}
    if format not in ("auto", *FORMATS):
        raise ValueError(f"no format {format!r}: auto, {', '.join(FORMATS)}")
    candidates = FORMATS if format == "auto" else {format: FORMATS[format]}
    for name, fields in candidates.items():
        unknown = set(columns) - set(fields)
        mapping = {ours: columns.get(ours, column) for ours, column in fields.items()}
        required = {column for ours, column in mapping.items() if ours != "input"}
        if not unknown and required <= present:
            mapping = {ours: column for ours, column in mapping.items() if column in present}
            _refuse_empty_prompts(source, rows, mapping, present)
            return name, mapping
    wanted = "; ".join(f"{n}: {', '.join(f.values())}" for n, f in candidates.items())
    raise ValueError(
        f"{source} has the columns {', '.join(sorted(present)) or '(none)'}, which fit no format ({wanted}): "
        "set data.format and map the names, e.g. data.columns: {instruction: question, response: answer}"
    )


def _refuse_empty_prompts(source: str, rows: list[Any], mapping: dict[str, str], present: set[str]) -> None:
    """A data set whose every instruction is empty is a mapping mistake, not data."""
    column = mapping.get("instruction")
    if column and not any(isinstance(row, dict) and row.get(column) not in (None, "") for row in rows):
        num_rows = sum(row is not None for row in rows)
        raise ValueError(
            f"{source}: {column} is empty in {num_rows} of {num_rows} rows; the columns are "
            f"{', '.join(sorted(present))}: map the right one, e.g. data.columns: {{instruction: NAME}}"
        )


def _convert(rows: list[Any], report: ReadReport) -> list[Record]:
    seen: dict[str, int] = {}
    records: list[Record] = []
    to_turns = _messages_turns if report.format == "messages" else _single_turn
    for number, row in enumerate(rows, start=1):
        if row is None:  # an empty line; it keeps its number
            continue
        try:
            if isinstance(row, BadRow):
                raise row
            if not isinstance(row, dict):
                raise BadRow(f"a JSON {_json_type(row)} instead of an object")
            turns, context = to_turns(row, report)
        except BadRow as kind:
            report.bad.setdefault(str(kind), []).append(number)
            continue
        if not any(role == "assistant" and text for role, text in turns):
            report.num_empty += 1
            continue
        while turns[-1][0] != "assistant":  # a question that nobody answers cannot be supervised
            turns = turns[:-1]
            report.num_unanswered += 1
        content = _content_id(turns, context)
        occurrence = seen.get(content, 0)
        seen[content] = occurrence + 1
        report.num_duplicates += occurrence > 0
        records.append(Record(f"{content}-{occurrence}", turns, context))
    return records


def _single_turn(row: dict[str, Any], report: ReadReport) -> tuple[tuple[tuple[str, str], ...], str]:
    instruction = _text(row, report.columns["instruction"])
    context = _text(row, report.columns["input"]) if "input" in report.columns else ""
    response = _text(row, report.columns["response"])
    if report.format == "oss_instruct":
        instruction = OSS_INSTRUCT_PREFIX + instruction
    return (("user", instruction), ("assistant", response)), "" if context.strip() in EMPTY_INPUTS else context


def _messages_turns(row: dict[str, Any], report: ReadReport) -> tuple[tuple[tuple[str, str], ...], str]:
    messages = row.get(report.columns["messages"])
    if not isinstance(messages, list):
        raise BadRow(f"messages is a JSON {_json_type(messages)}, not a list")
    turns = []
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise BadRow("a message without role and content")
        if message["role"] not in ROLES:
            raise BadRow(f"unknown role {message['role']!r}; known: {', '.join(ROLES)}")
        turns.append((message["role"], _text(message, "content")))
    return tuple(turns), ""


def _text(row: dict[str, Any], column: str) -> str:
    """A cell as text: null is empty; numbers and booleans take their JSON spelling; lists and objects are refused."""
    value = row.get(column)
    if value is None:
        return ""
    if isinstance(value, str):
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise BadRow(f"{column} holds half of a surrogate pair")
        return value
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    raise BadRow(f"{column} is a JSON {_json_type(value)} where text is expected")


def _content_id(turns: tuple[tuple[str, str], ...], context: str) -> str:
    """Hash of the conversation; an input column counts as part of the first turn, as other formats write it."""
    flat = [(role, user_text(text, context) if i == 0 else text) for i, (role, text) in enumerate(turns)]
    data = json.dumps(flat, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(data.encode(), digest_size=8).hexdigest()


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
