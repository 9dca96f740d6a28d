"""Stage 1a: files, folders, globs and hub data sets -> rows, each with its place.

Files are read here rather than by a table library, because a column's type must never be guessed from other rows: "007"
stays "007", a file with a byte order mark gives the same rows, a column that is empty in one shard disturbs no other, and
only LF separates JSON lines. A hub data set is its files: they are downloaded into the ordinary cache and read alike.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from .hub import download
from .json_values import Number, json_type, loads

SPLIT_NAMES = {  # split -> how files and folders of it are named
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test", "testing"),
}
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "cache-*.arrow")
_MAX_SPOILT = 200  # lines of a CSV file
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class BadRow(ValueError):
    """A row that cannot become a record; the message is its kind."""


@dataclass(frozen=True)
class Unreadable:
    """A cell of a column that cannot be text."""

    kind: str


@dataclass(frozen=True)
class Place:
    """Where a row stands: the file ("" when there is only one), and its line or row, counted from 1."""

    file: str
    unit: str
    number: int

    def __str__(self) -> str:
        """E.g. "line 3", or "part-1.jsonl line 3"."""
        return f"{self.file} {self.unit} {self.number}".strip()


@dataclass(frozen=True)
class Row:
    """A row as it was read: a value, or the BadRow that says why there is none."""

    value: Any
    place: Place


def read_rows(
    source: str, *, revision: str | None = None, split: str = "train", subset: str | None = None
) -> tuple[list[Row], list[str]]:
    """Every row of a source.

    Args:
        source: a file (.json, .jsonl, .csv, .tsv, .parquet, .arrow; also .gz), a folder of such files, a glob, or a hub id.
        revision: of a hub data set.
        split: which files of a folder or hub data set, told by their names.
        subset: which configuration of a hub data set whose card names several.

    Returns:
        rows in the order of the files' names, and notes on what was left out.

    Raises:
        ValueError: no such source, no readable file in it, or a file that is damaged as a whole.
    """
    files, notes = find_files(source, revision=revision, split=split, subset=subset)
    single = len(files) == 1
    rows: list[Row] = []
    for name, path in files:
        label = "" if single else name
        for unit, number, value in _read_file(path):
            rows.append(Row(value, Place(label, unit, number)))
    return rows, notes


def is_local(source: str) -> bool:
    """Whether a source is meant as a path, not as a hub id."""
    path = Path(source).expanduser()
    looks_like_one = source.startswith((".", "/", "~")) or any(c in source for c in "*?[")
    return looks_like_one or path.exists() or _reader_of(path) is not None


def find_files(
    source: str, *, revision: str | None = None, split: str = "train", subset: str | None = None, local_only: bool = False
) -> tuple[list[tuple[str, Path]], list[str]]:
    """The data files of a source as (name, path), and notes on what was left out; see `read_rows`."""
    path = Path(source).expanduser()
    if path.is_file():
        return [(path.name, path)], []
    if path.is_dir():
        return _choose(path, source, split)
    if any(c in source for c in "*?["):
        root = Path(path.anchor or ".")
        pattern = str(path.relative_to(path.anchor)) if path.anchor else str(path)
        found = sorted(p for p in root.glob(pattern) if p.is_file())
        if not found:
            raise ValueError(f"no file matches {source}")
        return [(p.name, p) for p in found], []
    if is_local(source):
        raise ValueError(f"data file {source} does not exist")
    card = download("dataset", source, revision, ["README.md"], local_only=local_only) / "README.md"
    patterns = _card_patterns(card, source, split, subset)
    wanted = hub_patterns() if patterns is None else [p for q in patterns for p in (q, q.replace("**/", ""))]
    folder = download("dataset", source, revision, wanted, local_only=local_only)
    return _choose(folder, source, split, patterns)


def _choose(
    folder: Path, source: str, split: str, patterns: list[str] | None = None
) -> tuple[list[tuple[str, Path]], list[str]]:
    """The files of one split in a folder; what is left out is named, since a test set must not be trained on unseen."""
    walked = (Path(root, name) for root, _, files in os.walk(folder, followlinks=True) for name in files)
    everything = sorted(p for p in walked if not _hidden(p.relative_to(folder)))
    data = [p for p in everything if _reader_of(p) is not None and not any(map(p.match, _NOT_DATA))]
    names = {p: str(p.relative_to(folder)) for p in everything}
    if not data:
        listed = ", ".join(list(names.values())[:5]) or "nothing"
        raise ValueError(f"{source} holds no data file ({', '.join(_READERS)}, or these with .gz), only {listed}")
    if patterns is not None:
        chosen = [p for p in data if any(_matches(names[p], pattern) for pattern in patterns)]
    else:
        chosen = [p for p in data if _is_of(names[p], split)]
        if not chosen and split == "train":
            chosen = [p for p in data if not any(_is_of(names[p], other) for other in SPLIT_NAMES)]
    if not chosen:
        raise ValueError(
            f"{source} has no files of split {split!r}, only {', '.join(names[p] for p in data[:5])}: set data.split, or "
            "give a glob"
        )
    left = [names[p] for p in everything if p not in set(chosen)]
    notes = [f"{source}: read {', '.join(names[p] for p in chosen[:5])}" + (", ..." if len(chosen) > 5 else "")
             + f"; left out {', '.join(left[:5])}" + (", ..." if len(left) > 5 else "")] if left else []
    return [(names[p], p) for p in chosen], notes


def hub_patterns() -> list[str]:
    """The files of a hub data set that can be read."""
    return ["README.md", *(f"*{suffix}{gz}" for suffix in _READERS for gz in ("", ".gz"))]


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _is_of(name: str, split: str) -> bool:
    """Whether a file's name, or a folder's over it, says that it is of a split: "train", or one's own like "train_sft"."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if split in SPLIT_NAMES:
        return bool(words & set(SPLIT_NAMES[split]))
    return set(re.split(r"[^a-z0-9]+", split.lower())) <= words


def _matches(name: str, pattern: str) -> bool:
    """Whether a path matches a glob: * stays inside a folder, ** crosses folders or none."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    translated = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.fullmatch("".join(translated.get(part, re.escape(part)) for part in parts), name) is not None


def _card_patterns(card: Path, source: str, split: str, subset: str | None) -> list[str] | None:
    """The file patterns that a data set's card gives for a split; None if it gives none."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    try:
        meta = yaml.safe_load(head.group(1)) if head else None
    except yaml.YAMLError:
        meta = None
    listed = meta.get("configs") if isinstance(meta, dict) else None
    configs = {c["config_name"]: c for c in listed or [] if isinstance(c, dict) and "config_name" in c}
    if subset is not None and subset not in configs:
        raise ValueError(f"{source} has no subset {subset!r}: {', '.join(configs) or 'its card names none'}")
    if not configs:
        return None
    default = next((n for n, c in configs.items() if c.get("default")), "default" if "default" in configs else None)
    name = subset or default or (next(iter(configs)) if len(configs) == 1 else None)
    if name is None:
        raise ValueError(f"{source} has the subsets {', '.join(configs)}: choose one with data.subset")
    files, inside = configs[name].get("data_files"), configs[name].get("data_dir")
    prefix = f"{inside.strip('/')}/" if inside else ""
    if files is None:
        return [f"{prefix}**"] if inside else None
    if isinstance(files, str) or (isinstance(files, list) and all(isinstance(f, str) for f in files)):
        files = [{"split": "train", "path": files}]
    paths = {f["split"]: f["path"] if isinstance(f["path"], list) else [f["path"]] for f in files}
    if split not in paths:
        raise ValueError(f"{source} has the splits {', '.join(paths)}, not {split!r}: set data.split")
    return [prefix + path for path in paths[split]]


# Readers give (unit, number, value); a value that cannot be read is a BadRow.
_Read = Iterator[tuple[str, int, Any]]


def _read_file(path: Path) -> _Read:
    reader = _reader_of(path)
    if reader is None:
        raise ValueError(
            f"{path}: expected {', '.join(_READERS)} (or these with .gz), not {path.suffix or 'a file without suffix'}"
        )
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}; fetch or compress it again") from None
    if data.startswith(_UTF16) and reader in (_read_json, _read_lines, _read_csv, _read_tsv):
        raise ValueError(f"{path} is UTF-16: convert it, e.g. iconv -f UTF-16 -t UTF-8")
    yield from reader(data.removeprefix(b"\xef\xbb\xbf"), path)


def _read_lines(data: bytes, path: Path) -> _Read:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield "line", number, _parse(line)


def _read_json(data: bytes, path: Path) -> _Read:
    text = data.decode("utf-8", "surrogateescape")  # a bad byte spoils its row, not the file
    try:
        rows = loads(text)
    except (ValueError, RecursionError) as error:
        first = data.strip().split(b"\n", 1)[0]
        if isinstance(_parse(first), dict):  # many .json files hold JSON lines
            yield from _read_lines(data, path)
            return
        raise ValueError(f"{path} is not a JSON document: {error}; for JSON lines name it .jsonl") from None
    if isinstance(rows, dict) and rows and "\n" not in text.strip():  # one JSON line
        rows = [rows]
    if not isinstance(rows, list):
        keys = f" with the keys {', '.join(rows)}" if isinstance(rows, dict) and rows else ""
        raise ValueError(f"{path} holds a JSON {json_type(rows)}{keys}, not a list of rows")
    for number, row in enumerate(rows, start=1):
        yield "row", number, row


def _read_csv(data: bytes, path: Path, delimiter: str = ",") -> _Read:
    header: list[str] | None = None
    for line, fields in _csv_rows(data.decode("utf-8", "surrogateescape"), delimiter, path):
        if isinstance(fields, BadRow):
            yield "line", line, fields
        elif not fields:
            continue
        elif header is None:
            header = [name.strip() for name in fields]
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice:
                raise ValueError(f"{path}: the header names {', '.join(map(repr, twice))} twice")
            if len(header) == 1 and any(d in header[0] for d in ";\t|"):
                raise ValueError(f"{path}: the header {header[0]!r} has no {delimiter!r}: separate columns by it")
        elif len(fields) != len(header):
            yield "line", line, BadRow(f"{len(fields)} fields where the header has {len(header)}")
        else:
            yield "line", line, dict(zip(header, fields, strict=True))


def _csv_rows(text: str, delimiter: str, path: Path) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Rows with the line they begin at. A quote that is never closed spoils its own line; reading goes on behind it."""
    csv.field_size_limit(sys.maxsize)
    lines = list(io.StringIO(text, newline=""))
    start, num_spoilt = 0, 0
    while start < len(lines):
        reader = csv.reader(islice(lines, start, None), delimiter=delimiter, strict=True)
        first = start
        try:
            for fields in reader:
                yield first + 1, fields
                first = start + reader.line_num
            return
        except csv.Error as error:
            num_spoilt += 1
            if num_spoilt > _MAX_SPOILT:  # each is looked for to the end of the file
                raise ValueError(f"{path}: more than {_MAX_SPOILT} quotes are not closed: is it CSV?") from None
            yield first + 1, BadRow(f"not CSV: {error} (a quote that is not closed or not doubled)")
            start = first + 1


def _read_tsv(data: bytes, path: Path) -> _Read:
    yield from _read_csv(data, path, "\t")


def _read_parquet(data: bytes, path: Path) -> _Read:
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a whole Parquet file: {error}") from None
    yield from _table_rows(table, path)


def _read_arrow(data: bytes, path: Path) -> _Read:
    problems = []
    for opener in (pa.ipc.open_file, pa.ipc.open_stream):
        try:
            table = opener(pa.BufferReader(data)).read_all()
            break
        except (pa.ArrowException, OSError) as error:
            problems.append(str(error))
    else:
        raise ValueError(f"{path} is neither an Arrow file nor an Arrow stream: {'; '.join(problems)}")
    yield from _table_rows(table, path)


def _table_rows(table: pa.Table, path: Path) -> _Read:
    twice = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if twice:
        raise ValueError(f"{path} has {', '.join(map(repr, twice))} twice among its columns")
    columns = {name: _column(table.column(name)) for name in table.column_names}
    for i in range(table.num_rows):
        yield "row", i + 1, {name: values[i] for name, values in columns.items()}


def _column(column: pa.ChunkedArray) -> list[Any]:
    """A column's values in JSON's types; text that is not UTF-8 keeps its bytes as surrogates and spoils only its row.

    A column that is not of these types, or heavy (vectors, pictures), disturbs only who asks for it.
    """
    if _is_heavy(column.type):
        return [Unreadable(f"of type {column.type}")] * len(column)
    try:
        return _values(column)
    except (pa.ArrowException, UnicodeDecodeError, OverflowError, ValueError, TypeError, KeyError) as error:
        return [Unreadable(f"of type {column.type}, not readable: {error}")] * len(column)


def _is_heavy(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = kind.value_type
        return types.is_floating(inner) or types.is_integer(inner) or _is_heavy(inner)
    return types.is_struct(kind) and any(types.is_binary(f.type) or types.is_large_binary(f.type) for f in kind)


def _values(column: pa.ChunkedArray) -> list[Any]:
    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return [v if v is None else v.decode("utf-8", "surrogateescape") for v in column.cast(pa.large_binary()).to_pylist()]
    if types.is_float16(kind) or types.is_float32(kind):  # 3.1, not 3.0999999046325684
        as_numpy = np.float16 if types.is_float16(kind) else np.float32
        return [None if v is None or v != v else Number(as_numpy(v)) for v in column.to_pylist()]
    if types.is_decimal(kind) or types.is_temporal(kind):
        return column.cast(pa.string()).to_pylist()
    return column.to_pylist()


_READERS: dict[str, Callable[..., _Read]] = {
    ".json": _read_json, ".jsonl": _read_lines, ".csv": _read_csv, ".tsv": _read_tsv, ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}


def _reader_of(path: Path) -> Callable[..., _Read] | None:
    return _READERS.get((path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower())


def _parse(line: bytes) -> Any:
    """A JSON line's value, or the BadRow that says why there is none."""
    try:
        return loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return BadRow("not UTF-8")
    except (ValueError, RecursionError):
        return BadRow("not JSON")
