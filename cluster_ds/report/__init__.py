"""Stage 14: what a run leaves for people: pages that are one file each and open from disk without a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..files import is_disk_full


def try_page(write: Callable[[], Path | None]) -> str:
    """Write a page; what goes wrong with it ends no work, a full disk apart.

    Args:
        write: gives the page's file, or None where there is nothing to show.
    Returns:
        a line that says what has come of it.
    """
    try:
        told = str(write() or "there is no log.jsonl, so no page on the training")
    except Exception as error:
        if is_disk_full(error):
            raise
        told = f"warning: a page could not be made ({type(error).__name__}: {error}); the run is not touched by that"
    return f"[report] {told}"
