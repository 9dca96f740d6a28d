"""Stage 0b: models and data sets of the hub, through its own cache, so that a login node can fetch for offline nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

Kind = Literal["model", "dataset"]
MODEL_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.safetensors"]
OLD_MODEL_FILES = [*MODEL_FILES[:-1], "*.bin"]


def offline() -> bool:
    """Whether the hub is switched off by HF_HUB_OFFLINE."""
    return constants.HF_HUB_OFFLINE


def download(kind: Kind, name: str, revision: str | None, patterns: list[str], *, local_only: bool = False) -> Path:
    """The folder of a repository in the hub's cache, with the files that match; nothing is fetched twice.

    Args:
        kind: "model" or "dataset".
        name: owner/name.
        revision: branch, tag or commit; the default branch if None.
        patterns: of the files that are wanted.
        local_only: look in the cache only.

    Raises:
        ValueError: saying what is missing and where to get it.
    """
    what = f"{'model' if kind == 'model' else 'data set'} {name!r}" + (f" at revision {revision!r}" if revision else "")
    fetch = "run `python launch/recipe.py fetch NAME` where the hub can be reached, with the same HF_HOME"
    try:
        folder = snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=patterns, local_files_only=local_only
        )
    except GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{'' if kind == 'model' else 'datasets/'}{name}"
        raise ValueError(
            f"{what} is gated: accept its licence at {page}, log in with `hf auth login`, then try again "
            f"({_first_line(error)})"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{what}: the hub has no such revision ({_first_line(error)})") from error
    except IncompleteSnapshotError as error:
        raise ValueError(f"{what} is not whole in {constants.HF_HUB_CACHE}: {_first_line(error)}; {fetch}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{what} is neither here nor on the hub: give a path, check the spelling, or log in if it is private "
            f"({_first_line(error)})"
        ) from error
    except LocalEntryNotFoundError as error:
        why = "the hub is switched off (HF_HUB_OFFLINE)" if offline() else "the hub was not asked" if local_only else (
            f"the hub cannot be reached ({_first_line(error)})"
        )
        raise ValueError(f"{what} is neither a path nor in {constants.HF_HUB_CACHE}, and {why}: {fetch}") from error
    except Exception as error:  # a name that is no repository name, a proxy, a full disk: the library has a type for each
        raise ValueError(f"{what} is neither a path nor to be had from the hub: {type(error).__name__}: {error}") from error
    return Path(folder)


def files_of(folder: Path) -> list[tuple[str, int, str]]:
    """(name, bytes, hash) of the files in a snapshot; the cache names a blob by its hash (SHA-256 for large files)."""
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    return [(str(p.relative_to(folder)), p.stat().st_size, os.path.basename(os.path.realpath(p))) for p in found]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
