"""Between stages 3 and 4: N feature vectors in memory or in shards on disk, read a block at a time.

Nothing here, nor in what is built on it, ever holds all vectors: a block is raised to the precision of the computation,
used, and dropped. Blocks are a pure function of the width H, each is computed by one thread, and results are combined in
the blocks' order, so that a result's bits depend neither on the number of threads nor on the number of ranks.
Shapes: N vectors, n of them used, H features, P features of the projection, b rows of a block.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import torch
from threadpoolctl import ThreadpoolController

T = TypeVar("T")
PROJECTION_DIM = 256  # P; distances are kept to about sqrt(2 / P), 9 %
BLOCK_ELEMENTS, _BLOCK_ROWS = 1 << 20, 4096  # b x H at most, and b
_FEW = 1 << 21  # elements that are not worth several threads
_MAX_THREADS = 16


@cache
def projection_matrix(dim: int) -> np.ndarray:
    """float32 [H, P], a Gaussian random projection that keeps squared lengths on average; always the same."""
    matrix = np.random.default_rng(0).standard_normal((dim, PROJECTION_DIM)) / np.sqrt(PROJECTION_DIM)
    return matrix.astype(np.float32)


class Features:
    """N stored vectors.

    Attributes:
        parts: float [n_s, H] arrays one behind the other, memory-mapped or not.
        rows: int64 [N], the sample that each stored vector belongs to.
        projection: float16 [n_s, P] arrays, stored beside the parts; empty where there is none.
    """

    def __init__(
        self, parts: Sequence[np.ndarray], rows: np.ndarray | None = None, projection: Sequence[np.ndarray] = ()
    ):
        self.parts, self.projection = list(parts), list(projection)
        self._offsets = np.concatenate([[0], np.cumsum([len(part) for part in self.parts])])
        self.rows = np.arange(self._offsets[-1]) if rows is None else rows
        self.dim = self.parts[0].shape[1]

    def __len__(self) -> int:
        """N."""
        return int(self._offsets[-1])

    @property
    def dtype(self) -> np.dtype:
        """Of what is stored."""
        return self.parts[0].dtype

    def gather(self, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy stored vectors into `out` [b, H], by their place in the store; returns it."""
        first, last = (int(np.searchsorted(self._offsets, p, side="right")) - 1 for p in (positions[0], positions[-1]))
        if first == last and positions[-1] - positions[0] == len(positions) - 1 and (np.diff(positions) == 1).all():
            start = int(positions[0] - self._offsets[first])
            out[:] = self.parts[first][start : start + len(positions)]
            return out
        part_of = np.searchsorted(self._offsets, positions, side="right") - 1
        for part in np.unique(part_of):
            inside = part_of == part
            out[inside] = self.parts[part][positions[inside] - self._offsets[part]]
        return out


def as_features(features: np.ndarray | Features) -> Features:
    """An array [N, H], or what is stored already.

    Raises:
        ValueError: for an array of another shape.
    """
    if isinstance(features, Features):
        return features
    features = np.asanyarray(features)  # a memory map stays one
    if features.ndim != 2 or features.shape[1] == 0:
        raise ValueError(f"features must be [N, H], got shape {features.shape}")
    if not np.issubdtype(features.dtype, np.floating):
        features = features.astype(np.float32)
    return Features([features])


@dataclass
class Points:
    """The vectors that a computation uses, in its order.

    Attributes:
        features: where they are stored.
        positions: int64 [n], their places in the store.
        scale: float64 [n], a factor of each vector, e.g. one over its length; None for 1.
        dtype: of the computation.
        device: where blocks are computed.
    """

    features: Features
    positions: np.ndarray
    scale: np.ndarray | None = None
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __len__(self) -> int:
        """Number of points n."""
        return len(self.positions)

    @property
    def dim(self) -> int:
        """H."""
        return self.features.dim

    def take(self, chosen: np.ndarray | slice) -> torch.Tensor:
        """[b, H], some of the points."""
        positions = self.positions[chosen]
        stored = np.empty((len(positions), self.dim), dtype=self.features.dtype)
        block = torch.from_numpy(self.features.gather(positions, stored)).to(self.device, self.dtype)
        return self._scaled(block, chosen)

    def _scaled(self, block: torch.Tensor, chosen: np.ndarray | slice) -> torch.Tensor:
        if self.scale is None:
            return block
        return block.mul_(torch.from_numpy(np.ascontiguousarray(self.scale[chosen])).to(self.device, self.dtype)[:, None])

    def map_blocks(self, work: Callable[[slice, torch.Tensor, torch.Tensor], T]) -> Iterator[tuple[slice, T]]:
        """`work(span, block, spare)` on every block, several at a time; the results in the blocks' order.

        The block and a spare buffer of its shape belong to the thread and are used again for its next block: memory that is
        asked for anew for every block would be torn by the small results in between, and the process would grow without end.
        """
        size = min(_BLOCK_ROWS, max(1, BLOCK_ELEMENTS // self.dim))
        spans = [slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]
        local = threading.local()

        def run(span: slice) -> T:
            if not hasattr(local, "stored"):
                local.stored = np.empty((size, self.dim), dtype=self.features.dtype)
                local.block, local.spare = torch.empty(2, size, self.dim, dtype=self.dtype, device=self.device)
            b = span.stop - span.start
            stored = self.features.gather(self.positions[span], local.stored[:b])
            block = local.block[:b].copy_(torch.from_numpy(stored))
            return work(span, self._scaled(block, span), local.spare[:b])

        if num_threads() == 1 or len(spans) == 1 or len(self) * self.dim <= _FEW:
            for span in spans:
                yield span, run(span)
            return
        with ThreadPoolExecutor(num_threads()) as pool:
            ahead = 4 * num_threads()  # so many results wait at most
            running = [(span, pool.submit(run, span)) for span in spans[:ahead]]
            for following in [*spans[ahead:], *[None] * len(running)]:
                span, future = running.pop(0)
                yield span, future.result()
                if following is not None:
                    running.append((following, pool.submit(run, following)))

    def projected(self) -> Points:
        """The same points in P dimensions: what is stored beside them, or made here (float16 if they have a scale)."""
        if self.features.projection:
            return Points(
                Features(self.features.projection), self.positions, self.scale, torch.float32, self.device
            )
        matrix = torch.from_numpy(projection_matrix(self.dim)).to(self.device, self.dtype)
        kind = torch.float32 if self.scale is None else torch.float16  # scaled to unit length; others may overflow
        out = np.empty((len(self), PROJECTION_DIM), dtype=np.float32 if self.scale is None else np.float16)
        for span, block in self.map_blocks(lambda _, x, __: (x @ matrix).to(kind).cpu().numpy()):
            out[span] = block
        return Points(Features([out]), np.arange(len(self)), None, torch.float32, self.device)

    def norms(self) -> np.ndarray:
        """float64 [n], lengths; not finite where a vector is not."""
        parts = self.map_blocks(lambda _, block, __: torch.linalg.vector_norm(block, dim=1).cpu().numpy())
        return np.concatenate([norms for _, norms in parts]).astype(np.float64)


def num_threads() -> int:
    """Threads for blocks: the cores that this process may use."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def available_memory() -> int:
    """Bytes of host memory that this process may still take: of the machine, and of the control groups it is in."""
    free = int(psutil.virtual_memory().available)
    try:
        group = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().split("::")[-1].strip().lstrip("/"))
    except OSError:
        return free
    for folder in (group, *group.parents):
        try:
            limit = (folder / "memory.max").read_text().strip()
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            free = min(free, max(0, int(limit) - int(stat["anon"])))
    return free


@cache
def _controller() -> ThreadpoolController:
    """Looking for the thread pools of all libraries takes longer than many a computation here."""
    return ThreadpoolController()


@contextmanager
def one_thread_a_block() -> Iterator[None]:
    """Inside, each numerical call uses one thread; blocks run side by side instead."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _controller().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(before)
