"""How the house speaks: tables, framed on a terminal and plain in a job's log, and libraries that hold their peace."""

from __future__ import annotations

import io
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

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
        table = Table(title=Text(title), show_header=bool(header))  # as texts: brackets of a path are no markup
        for number, right in enumerate(numeric):
            name = Text(header[number] if header else "")
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    lines = [list(header)] if header else []
    lines += map(list, rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for line in lines:
        cells = (cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(line, widths, numeric, strict=True))
        print(f"  {'  '.join(cells)}".rstrip(), flush=True)


def _say(line: str) -> None:
    print(line, flush=True)


class Progress:
    """A bar on a terminal, ten lines in a job's log.

    Args:
        label: of the stage.
        total: how many there are; 0 shows nothing.
        unit: of them, in the plural.
        say: prints a line; by default to stdout at once.
    """

    def __init__(self, label: str, total: int, unit: str, say: Callable[[str], None] | None = None):
        self._bar = tqdm(total=total, desc=label, unit=f" {unit}", disable=None if total else True)
        self._label, self._unit, self._total, self._say = label, unit, total, say or _say
        self._started, self._done = time.perf_counter(), 0

    def reach(self, done: int) -> None:
        """So many are done in all."""
        self._bar.update(done - self._done)
        before, self._done = self._done, done
        if self._bar.disable and 10 * done // self._total > 10 * before // self._total:
            left = (time.perf_counter() - self._started) * (self._total - done) / done
            self._say(f"[{self._label}] {done} of {self._total} {self._unit}, about {left:.0f} s left")
        if done == self._total:
            self.close()

    def add(self, number: int) -> None:
        """So many more are done."""
        self.reach(self._done + number)

    def close(self) -> None:
        """The bar stays as it is."""
        self._bar.close()

    def print(self, line: str) -> None:
        """A line that does not break the bar."""
        if self._bar.disable:
            self._say(line)
        else:
            self._bar.write(line)


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
