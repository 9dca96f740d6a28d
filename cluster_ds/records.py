"""Stage 1b: rows -> Record(id, turns, context); bad rows are counted and named, nothing vanishes without a count."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .json_values import json_type, loads
from .sources import BadRow, Place, Row, Unreadable, read_rows
from .templates import EMPTY_INPUTS, user_text

# format -> our field -> the column it is read from
FORMATS: dict[str, dict[str, str]] = {
    "messages": {"messages": "messages"},
    "sharegpt": {"messages": "conversations", "system": "system"},
    "oss_instruct": {"instruction": "problem", "response": "solution", "system": "system"},
    "instruction_response": {"instruction": "instruction", "input": "input", "response": "response", "system": "system"},
    "alpaca": {"instruction": "instruction", "input": "input", "response": "output", "system": "system"},
    "prompt_completion": {"prompt": "prompt", "completion": "completion"},
}
_TELLING = {"oss_instruct": {"lang"}}  # Magicoder's own; others' "problem" and "solution" are no coding problems
_OPTIONAL = ("input", "system")
OSS_INSTRUCT_PREFIX = "Write a solution to the following coding problem:\n"  # magicoder's preprocess_data.py
ROLES = {  # as data sets write it -> ours
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "function_call": "assistant", "tool": "tool", "observation": "tool", "function_response": "tool",
}
_KEYS = (("role", "content"), ("from", "value"))
DEFAULT_SOURCE = "data"
_SHOWN = 5


@dataclass(frozen=True)
class Source:
    """Where rows come from and how they are read; see `sources.read_rows` and FORMATS."""

    path: str
    revision: str | None = None
    split: str = "train"
    subset: str | None = None
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """One sample as text.

    `id` is a hash of the content plus the number of earlier rows with the same content, so that the same rows have the
    same ids in any file format and any order of distinct rows.
    """

    id: str
    turns: tuple[tuple[str, str], ...]  # (role, text)
    context: str = ""  # Alpaca's input column
    source: str = DEFAULT_SOURCE
    place: str = field(default="", compare=False)
    row: int = field(default=0, compare=False)  # of all that its source holds, unreadable ones counted


@dataclass
class ReadReport:
    """What reading one source found; shown before anything else happens."""

    source: str = DEFAULT_SOURCE
    num_rows: int = 0
    num_empty: int = 0
    num_unprompted: int = 0
    num_duplicates: int = 0
    num_unanswered: int = 0
    format: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)  # column, or key of a message -> how many hold a value
    bad: dict[str, list[Place]] = field(default_factory=dict)  # kind -> where

    @property
    def num_bad(self) -> int:
        """Rows that could not be read."""
        return sum(len(rows) for rows in self.bad.values())

    def lines(self) -> list[str]:
        """The report as text, one finding a line."""
        mapping = ", ".join(f"{ours} <- {column}" for ours, column in self.columns.items())
        out = [*self.notes, f"{self.num_rows} rows read as {self.format} ({mapping})"]
        if self.unused:
            out.append("not used: " + ", ".join(f"{name} ({count})" for name, count in sorted(self.unused.items())))
        if self.num_empty:
            out.append(f"{self.num_empty} rows excluded: empty response (in a chat: no answer, or an empty one)")
        if self.num_unprompted:
            out.append(f"{self.num_unprompted} rows have an empty instruction; they are kept")
        if self.num_duplicates:
            out.append(f"{self.num_duplicates} rows repeat an earlier row; they are kept")
        if self.num_unanswered:
            out.append(f"{self.num_unanswered} turns behind the last answer left out")
        out += [f"{len(places)} bad rows: {kind} ({_where(places)})" for kind, places in self.bad.items()]
        named = out if self.source == DEFAULT_SOURCE else [f"{self.source}: {line}" for line in out]
        return [_printable(line) for line in named]


def read_records(
    sources: Mapping[str, Source], max_bad_fraction: float = 0.01
) -> tuple[list[Record], list[ReadReport]]:
    """Read every row of all sources.

    Args:
        sources: name -> source; the name is kept with every record.
        max_bad_fraction: unreadable rows of a source that are tolerated; rows with an empty response do not count.

    Returns:
        the usable records in the sources' order, and a report of each source.

    Raises:
        ValueError: no such source, unknown columns, no usable row, or too many bad rows.
    """
    records: list[Record] = []
    reports = []
    seen: Counter[str] = Counter()
    for name, source in sources.items():
        found, report = _read_source(name, source, seen, max_bad_fraction)
        records += found
        reports.append(report)
    return records, reports


def content_hash(records: Iterable[Record]) -> str:
    """Hash of the records' ids, contexts and sources in order: what the tokens, and so everything after them, depend on."""
    digest = hashlib.blake2b(digest_size=16)
    for record in records:
        digest.update(record.id.encode() + b"\0" + record.context.encode() + b"\0")
        if record.source != DEFAULT_SOURCE:
            digest.update(record.source.encode() + b"\0\0")
    return digest.hexdigest()


def _read_source(
    name: str, source: Source, seen: Counter[str], max_bad_fraction: float
) -> tuple[list[Record], ReadReport]:
    path = source.path
    rows, notes = read_rows(path, revision=source.revision, split=source.split, subset=source.subset)
    if not rows:
        raise ValueError(f"{path} holds no rows")
    report = ReadReport(source=name, num_rows=len(rows), notes=notes)
    report.format, report.columns = _detect(path, rows, source.format, source.columns)
    records = _convert(rows, report, seen)
    if report.num_bad > max_bad_fraction * report.num_rows:
        raise ValueError(
            f"{path}: {report.num_bad} of {report.num_rows} rows are bad, more than data.max_bad_fraction "
            f"{max_bad_fraction:g} allows: mend them (an answer must be text; write objects as JSON text), map other "
            "columns with data.columns, or raise the limit\n  " + "\n  ".join(report.lines())
        )
    if not records:
        raise ValueError(f"{path}: none of {report.num_rows} rows is usable\n  " + "\n  ".join(report.lines()))
    return records, report


def _detect(path: str, rows: list[Row], format: str, columns: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The format's name and its column map with the user's names in it."""
    present = {column for row in rows if isinstance(row.value, dict) for column in row.value}
    if not present:
        raise ValueError(
            f"{path}: none of {len(rows)} rows is an object with columns; the first is "
            + (str(rows[0].value) if isinstance(rows[0].value, BadRow) else f"a JSON {json_type(rows[0].value)}")
            + f" ({rows[0].place})"
        )
    if format not in ("auto", *FORMATS):
        raise ValueError(f"no format {format!r}: auto, {', '.join(FORMATS)}")
    candidates = FORMATS if format == "auto" else {format: FORMATS[format]}
    for name, fields in candidates.items():
        mapping = {ours: columns.get(ours, column) for ours, column in fields.items()}
        required = {column for ours, column in mapping.items() if ours not in _OPTIONAL or ours in columns}
        if format == "auto" and not columns:
            required |= _TELLING.get(name, set())
        if set(columns) <= set(fields) and required <= present:
            mapping = {ours: column for ours, column in mapping.items() if column in present}
            _refuse_empty_prompts(path, rows, mapping, present)
            return name, mapping
    needs = {n: [c for ours, c in fields.items() if ours not in _OPTIONAL] for n, fields in candidates.items()}
    wanted = "; ".join(f"{name}: {', '.join(names)}" for name, names in needs.items())
    mapped = f" with {', '.join(f'{o} <- {c}' for o, c in columns.items())}" if columns else ""
    names = _printable(", ".join(sorted(present)))
    raise ValueError(
        f"{path} has the columns {names}, which{mapped} fit no format ({wanted}): set data.format and map the names, e.g. "
        "data.columns: {instruction: question, response: answer}"
    )


def _refuse_empty_prompts(path: str, rows: list[Row], mapping: dict[str, str], present: set[str]) -> None:
    """A data set whose every instruction is empty is a mapping mistake, not data."""
    for ours in ("instruction", "prompt"):
        column = mapping.get(ours)
        if column and not any(isinstance(r.value, dict) and r.value.get(column) not in (None, "", []) for r in rows):
            raise ValueError(
                f"{path}: {column} is empty in {len(rows)} of {len(rows)} rows; the columns are "
                f"{_printable(', '.join(sorted(present)))}: map the right one, e.g. data.columns: {{{ours}: NAME}}"
            )


Turns = tuple[tuple[str, str], ...]


def _convert(rows: list[Row], report: ReadReport, seen: Counter[str]) -> list[Record]:
    readers: dict[str, Callable[[dict[str, Any], ReadReport], tuple[Turns, str]]] = {
        "messages": _chat, "sharegpt": _chat, "prompt_completion": _prompt_completion,
    }
    to_turns = readers.get(report.format, _single_turn)
    used = set(report.columns.values())
    records: list[Record] = []
    for number, row in enumerate(rows):
        value = row.value
        try:
            if isinstance(value, BadRow):
                raise value
            if not isinstance(value, dict):
                raise BadRow(f"a JSON {json_type(value)} instead of an object")
            turns, context = to_turns(value, report)
        except BadRow as kind:
            report.bad.setdefault(str(kind), []).append(row.place)
            continue
        report.unused.update(c for c, cell in value.items() if c not in used and cell not in (None, "", [], {}))
        answers = [text for role, text in turns if role == "assistant"]
        if not answers or not all(text.strip() for text in answers):
            report.num_empty += 1
            continue
        while turns[-1][0] != "assistant":  # a question that nobody answers cannot be supervised
            turns = turns[:-1]
            report.num_unanswered += 1
        report.num_unprompted += all(not text for role, text in turns if role == "user")
        content = _content_id(turns, context)
        report.num_duplicates += seen[content] > 0
        records.append(Record(f"{content}-{seen[content]}", turns, context, report.source, str(row.place), number))
        seen[content] += 1
    return records


def _single_turn(row: dict[str, Any], report: ReadReport) -> tuple[Turns, str]:
    instruction = _text(row, report.columns["instruction"])
    context = _text(row, report.columns["input"]) if "input" in report.columns else ""
    response = _text(row, report.columns["response"])
    if report.format == "oss_instruct":
        instruction = OSS_INSTRUCT_PREFIX + instruction
    turns = (*_system(row, report), ("user", instruction), ("assistant", response))
    return turns, "" if context.strip() in EMPTY_INPUTS else context


def _chat(row: dict[str, Any], report: ReadReport) -> tuple[Turns, str]:
    return (*_system(row, report), *_turns(row.get(report.columns["messages"]), report.columns["messages"], report)), ""


def _prompt_completion(row: dict[str, Any], report: ReadReport) -> tuple[Turns, str]:
    """Both are text, or both are lists of messages."""
    turns: list[tuple[str, str]] = []
    for ours, role in (("prompt", "user"), ("completion", "assistant")):
        column = report.columns[ours]
        messages = _json_messages(row.get(column))
        if isinstance(messages, list):
            turns += _turns(messages, column, report)
        else:
            turns.append((role, _text(row, column)))
    return tuple(turns), ""


def _system(row: dict[str, Any], report: ReadReport) -> Turns:
    text = _text(row, report.columns["system"]) if "system" in report.columns else ""
    return (("system", text),) if text else ()


def _turns(messages: Any, column: str, report: ReadReport) -> Turns:
    """A list of messages, or such a list as JSON text (in a CSV cell)."""
    messages = _json_messages(messages)
    if not isinstance(messages, list):
        raise BadRow(f"{column} is a JSON {json_type(messages)}, not a list of messages")
    turns = []
    for message in messages:
        keys = next((k for k in _KEYS if isinstance(message, dict) and k[0] in message), None)
        if keys is None or (keys[1] not in message and not message.get("tool_calls")):
            raise BadRow("a message without role and content (or from and value)")
        if message.get("tool_calls"):
            raise BadRow("a message with tool_calls, which every template writes differently: put their text into content")
        role = ROLES.get(message[keys[0]]) if isinstance(message[keys[0]], str) else None
        if role is None:
            raise BadRow(f"unknown role {message[keys[0]]!r}; known: {', '.join(ROLES)}")
        report.unused.update(f"{column}.{k}" for k, v in message.items() if k not in keys and v not in (None, "", [], {}))
        turns.append((role, _content(message, keys[1])))
    return tuple(turns)


def _json_messages(value: Any) -> Any:
    """Text that is a JSON list of objects as that list; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        parsed = loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, list) and parsed and all(isinstance(m, dict) for m in parsed) else value


def _content(message: dict[str, Any], key: str) -> str:
    """A message's text; a list of parts is joined if all of them are text."""
    parts = message[key]
    if isinstance(parts, list) and parts and all(isinstance(p, dict) and p.get("type") == "text" for p in parts):
        return "".join(_text(part, "text") for part in parts)
    return _text(message, key)


def _text(row: dict[str, Any], column: str) -> str:
    """A cell as text: null is empty; numbers and booleans take their JSON spelling; lists and objects are refused."""
    value = row.get(column)
    if value is None:
        return ""
    if isinstance(value, str):
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise BadRow(f"{column} is not valid Unicode (bytes that are not UTF-8, or half of a surrogate pair)")
        return str(value)
    if isinstance(value, float) and value != value:
        return ""  # how tables write a missing value
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, Unreadable):
        raise BadRow(f"{column} is {value.kind}, where text is expected")
    raise BadRow(f"{column} is a JSON {json_type(value)} where text is expected")


def _printable(text: str) -> str:
    """Names in a strange encoding, which Python holds as surrogates, would not print."""
    return text.encode("utf-8", "backslashreplace").decode()


def content_of(sample_id: str) -> str:
    """The part of a sample's id that rows of the same content share."""
    return sample_id.rpartition("-")[0]


def _content_id(turns: Turns, context: str) -> str:
    """Hash of the conversation; an input column counts as part of the user's turn, as other formats write it."""
    first = next((i for i, (role, _) in enumerate(turns) if role == "user"), 0)
    flat = [(role, user_text(text, context) if i == first else text) for i, (role, text) in enumerate(turns)]
    data = json.dumps(flat, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(data.encode(), digest_size=8).hexdigest()


def _where(places: list[Place]) -> str:
    """E.g. "lines 3, 9" or "part-1.jsonl lines 3, 9; part-2.jsonl line 4"."""
    groups: dict[tuple[str, str], list[int]] = {}
    for place in places[:_SHOWN]:
        groups.setdefault((place.file, place.unit), []).append(place.number)
    text = "; ".join(
        f"{file} {unit}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}".strip()
        for (file, unit), numbers in groups.items()
    )
    return text + (", ..." if len(places) > _SHOWN else "")
