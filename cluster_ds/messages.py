"""How the house speaks: tables, framed on a terminal and plain in a job's log, and libraries that hold their peace."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout

from rich.console import Console
from rich.table import Table

_LIBRARIES = ("transformers", "datasets", "huggingface_hub", "accelerate", "peft", "torch", "DeepSpeed")


def show_table(title: str, rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> None:
    """Print a table: framed on a terminal, else aligned columns that a search in a log finds line by line.

    Args:
        title: above it.
        rows: of text; columns of numbers are aligned to the right.
        header: names of the columns; none for a list of facts.
    """
    columns: list[tuple[str, ...]] = list(zip(*rows, strict=True)) or [() for _ in header]
    numeric = [bool(header) and all(cell[:1] in "0123456789+-." for cell in column) for column in columns]
    if sys.stdout.isatty():
        table = Table(title=title, show_header=bool(header))
        for number, right in enumerate(numeric):
            table.add_column(header[number] if header else "", justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    lines = [list(header)] if header else []
    lines += map(list, rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for line in lines:
        cells = (cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(line, widths, numeric, strict=True))
        print(f"  {'  '.join(cells)}".rstrip(), flush=True)


def quiet_libraries(rank: int = 0) -> None:
    """Leave out what libraries say of their own future and progress, and what they warn of on every rank alike but 0."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # two lines of every rank for every load
    # A toolkit without a GPU, as on login nodes, is nothing to warn of.
    logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime" not in str(record.msg))
    for category in (FutureWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    if rank > 0:
        warnings.simplefilter("ignore")
        for name in _LIBRARIES:
            logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def unless_it_fails() -> Iterator[None]:
    """Hold back what is printed inside, and print it if the inside fails."""
    held = io.StringIO()
    try:
        with redirect_stdout(held):
            yield
    except BaseException:
        print(held.getvalue(), end="", flush=True)
        raise


@contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Leave out a library's progress bars where a job's log would hold each of their states."""
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        yield
