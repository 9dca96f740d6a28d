"""Stage 3a: where proxies lie on disk: rows in batches, batches in shards, each shard a file of its own.

Batches are a pure function of the lengths and a token budget, made over all rows before ranks take them, so proxies do not
depend on the number of ranks. They are dealt to shards of equal work. A shard is one safetensors file that is memory-mapped
afterwards, with its checksum and the key of its inputs in a sidecar that appears last. Shapes: N samples, H hidden, P
projection.
"""

from __future__ import annotations

import json
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from .features import PROJECTION_DIM, Features, num_threads
from .files import commit_file, hash_files, read_json, write_json
from .tokens import TokenTable

_BATCHES_PER_SHARD = 8
_MOST_PADDING, _LEAST_FILLING = 0.03, 0.25  # of a batch
_MIN_SHARDS, _MAX_SHARDS = 32, 1024
_ROW_BYTES = 16  # row number, norm and loss beside the features
_SHARD_BYTES = 8192  # a header and a sidecar, in whole blocks
_DTYPES = {"F16": np.float16, "F32": np.float32, "I64": np.int64}  # of the arrays of a shard


@dataclass(frozen=True)
class Proxies:
    """What the forward pass leaves of every sample, in the order of the token table.

    Attributes:
        features: float16 [N, H], unit vectors, memory-mapped, with their projection [N, P] where H > P.
        norms: float32 [N], lengths of the proxies before normalisation.
        losses: float32 [N], mean token loss.
    """

    features: Features
    norms: np.ndarray
    losses: np.ndarray


def length_batches(lengths: np.ndarray, tokens_per_batch: int) -> list[np.ndarray]:
    """Group rows of like length so that rows x longest <= tokens_per_batch; a longer row stands alone.

    A batch ends early where more of it would be padding, though not before it is a quarter full.

    Args:
        lengths: int64 [N].
        tokens_per_batch: padded tokens of a batch.
    Returns:
        arrays of rows, longest batches first; every row once.
    """
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    batches, start = [], 0
    while start < len(order):
        longest = int(sorted_lengths[start])
        tokens = sorted_lengths[start : start + max(1, tokens_per_batch // longest)]
        padded = longest * np.arange(1, len(tokens) + 1)
        fits = (np.cumsum(tokens) >= (1 - _MOST_PADDING) * padded) | (padded <= tokens_per_batch * _LEAST_FILLING)
        size = int(fits.cumprod().sum())  # the first row always fits
        batches.append(order[start : start + size])
        start += size
    return batches


def padding_share(lengths: np.ndarray, batches: list[np.ndarray]) -> float:
    """Part of the tokens of all forward passes that is padding."""
    computed = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    return 1.0 - int(lengths.sum()) / computed


def shard_batches(batches: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Deal batches to shards of equal work; their number does not depend on the ranks."""
    num_shards = min(len(batches), max(_MIN_SHARDS, min(_MAX_SHARDS, -(-len(batches) // _BATCHES_PER_SHARD))))
    return [batches[s::num_shards] for s in range(num_shards)]


def missing_shards(folder: Path, num_shards: int) -> list[int]:
    """The shards that are not finished, in order."""
    return [s for s in range(num_shards) if not _sidecar(folder, s).is_file()]


def shard_bytes(num_rows: int, num_shards: int, hidden_size: int) -> int:
    """Disk space that shards of so many rows take."""
    width = hidden_size + (PROJECTION_DIM if hidden_size > PROJECTION_DIM else 0)
    return num_rows * (2 * width + _ROW_BYTES) + num_shards * _SHARD_BYTES


def write_shard(folder: Path, shard: int, key: str, arrays: dict[str, np.ndarray], seconds: float) -> None:
    """Write a shard's rows and what belongs to them, then its sidecar: without that there is no shard.

    Args:
        folder: of the shards.
        shard: its number.
        key: hash of everything that decides the arrays.
        arrays: "rows" int64 [n] and others [n, ...].
        seconds: of one rank, that they took.
    """
    path = _shard(folder, shard)
    with commit_file(path) as part:
        save_file(arrays, part)
    facts = {"hash": hash_files([path]), "rows": len(arrays["rows"]), "key": key, "seconds": seconds}
    write_json(_sidecar(folder, shard), facts)


def shard_seconds(folder: Path, num_shards: int) -> float | None:
    """Seconds of one rank that all shards took, whenever they were made; None if an earlier version made one."""
    seconds = [read_json(_sidecar(folder, s)).get("seconds") for s in range(num_shards)]
    return None if None in seconds else float(sum(seconds))


def read_proxies(folder: Path, tokens: TokenTable, tokens_per_batch: int, key: str) -> Proxies:
    """Open all shards, verified against their checksums; features stay on disk.

    Raises:
        ValueError: naming the shard that is missing, damaged or of other inputs, with the command that mends it.
    """
    shards = shard_batches(length_batches(tokens.num_tokens, tokens_per_batch))

    def opened(shard: int) -> dict[str, np.ndarray]:
        return open_shard(folder, shard, key, np.concatenate(shards[shard]))

    with ThreadPoolExecutor(num_threads()) as pool:
        parts = list(pool.map(opened, range(len(shards))))
    rows = np.concatenate([part["rows"] for part in parts])
    back = np.argsort(rows)
    norms, losses = (np.concatenate([part[name] for part in parts])[back] for name in ("norms", "losses"))
    projection = [part["projection"] for part in parts if "projection" in part]
    return Proxies(Features([part["features"] for part in parts], rows, projection), norms, losses)


def open_shard(folder: Path, shard: int, key: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a shard, memory-mapped and verified against its checksum.

    Args:
        folder, shard, key: as given to `write_shard`.
        rows: int64 [n], that it must hold.
    Raises:
        ValueError: if it is missing, damaged or of other inputs, with the command that mends it.
    """
    path, sidecar = _shard(folder, shard), _sidecar(folder, shard)
    command = shlex.join(["rm", "-f", str(path), str(sidecar)])
    remedy = f"`{command}` and the same command again make it anew, the other shards are kept"
    if not sidecar.is_file() or not path.is_file():
        raise ValueError(f"shard {path} is missing: {remedy}")
    try:
        facts = read_json(sidecar)
        damaged = hash_files([path]) != facts["hash"]
    except (ValueError, KeyError, TypeError):
        damaged, facts = True, {}
    if damaged:
        raise ValueError(f"shard {path} is damaged, it does not have the checksum of {sidecar.name}: {remedy}")
    if facts.get("key") != key:
        raise ValueError(
            f"shard {path} is of another model, other data or settings (its key is {facts.get('key')}, this run's "
            f"{key}): {remedy}"
        )
    arrays = _map_arrays(path)
    if not np.array_equal(arrays["rows"], rows):
        raise ValueError(f"shard {path} holds other samples than this run's shard {shard}: {remedy}")
    return arrays


def _map_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, memory-mapped; torch's map holds no descriptor, so that any number may be open."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8).numpy()
    arrays = {}
    for name, spec in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in spec["data_offsets"])
            arrays[name] = content[begin:end].view(_DTYPES[spec["dtype"]]).reshape(spec["shape"])
    return arrays


def _shard(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.safetensors"


def _sidecar(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.json"
