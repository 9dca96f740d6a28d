"""Crash-safe files and folders: written beside their place, flushed to disk, then renamed in one step.

A reader sees a finished thing or nothing; a killed writer leaves only a `.part` folder that the next writer removes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def read_json(path: Path) -> Any:
    """Parse a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with commit_file(path) as part:
        part.write_text(text, encoding="utf-8")
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_committed(folder: Path) -> bool:
    """Whether `commit_folder` has finished this folder."""
    return (folder / MANIFEST).is_file()


def require_ours(folder: Path) -> None:
    """Refuse to replace a folder that `commit_folder` has not made.

    Raises:
        ValueError: naming the folder.
    """
    if folder.exists() and not is_committed(folder):
        raise ValueError(f"{folder} is there, but was not made by cluster-ds: choose another --output_dir, or move it away")


def require_space(folder: Path, num_bytes: float, what: str) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        ValueError: with both numbers.
    """
    at = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(at).free
    if free < num_bytes:
        raise ValueError(
            f"{what} needs about {size_text(num_bytes)} in {folder}, {size_text(free)} are free there: free space, or put "
            "it elsewhere (--output_dir, data.cache_dir)"
        )


def size_text(num_bytes: float) -> str:
    """E.g. "1.8 GB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for want of space; torch and safetensors say so in their own words."""
    text = str(error)
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(
        phrase in text for phrase in ("No space left", "os error 28", "file write failed", "unexpected pos")
    )


@contextmanager
def exclusive(folder: Path, waiting: str) -> Iterator[None]:
    """Hold a folder; the kernel lets go of it when its holder ends. `waiting` is printed if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(waiting, flush=True)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: two builders do the same work twice, and the first to finish wins
        pass
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def commit_folder(folder: Path, manifest: dict[str, Any], replace: bool = False) -> Iterator[Path]:
    """Fill a folder that appears only when everything in it is on disk.

    Several processes may build the same folder: the first to finish wins, the others' work is dropped. Leftovers of
    writers that died on this host are removed.

    Args:
        folder: the final place.
        manifest: written last, as `manifest.json`; entries that the caller adds while filling are included.
        replace: whether a finished folder gives way (a new export) or stays (a cache).
    """
    if replace:
        require_ours(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    part = folder.with_name(f"{folder.name}.{_owner()}.part")
    part.mkdir()
    try:
        yield part
        write_json(part / MANIFEST, manifest)
        for path in part.rglob("*"):
            if path.is_file():
                fsync(path)
        old = None
        if replace and folder.exists():
            old = folder.with_name(f"{folder.name}.{_owner()}.old.part")
            os.rename(folder, old)
        try:
            os.rename(part, folder)
        except OSError:
            if not is_committed(folder):
                raise
        fsync(folder.parent)
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def commit_file(path: Path) -> Iterator[Path]:
    """Write a file beside its place and rename it when it is on disk; several processes may write the same file."""
    _remove_leftovers(path)
    part = path.with_name(f"{path.name}.{_owner()}.part")
    try:
        yield part
        fsync(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _owner() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def _remove_leftovers(folder: Path) -> None:
    host = socket.gethostname()
    for part in folder.parent.glob(f"{folder.name}.{host}-*.part"):
        pid = part.name[len(folder.name) + 1 + len(host) + 1 :].split("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def hash_files(paths: list[Path]) -> str:
    """Content hash of files, names included.

    A file of the hub's cache is a link to a blob that is named by its content's hash already; that name is trusted, so
    that 13 GB of weights need not be read again.
    """
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda p: p.name):
        digest.update(path.name.encode() + b"\0")
        real = path.resolve()
        if real.parent.name == "blobs" and len(real.name) == 64:
            digest.update(real.name.encode())
        else:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]
