"""Beside the stages: the most memory that each of them held, on the host and on the GPU, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .distributed import Ranks
from .files import size_text

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@contextmanager
def peak_memory(stage: str, ranks: Ranks) -> Iterator[None]:  # collective
    """Print a stage's peaks at its end: of the greediest rank, and the host's sum over all ranks."""
    on_gpu = ranks.device.type == "cuda"
    try:
        _CLEAR.write_text("5")  # Linux: forget the high-water mark
    except OSError:
        pass
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    yield
    peaks = ranks.gather((_host_peak_bytes(), torch.cuda.max_memory_allocated() if on_gpu else 0))  # collective
    host, gpu = ([peak[i] for peak in peaks] for i in range(2))
    text = f"host {size_text(max(host))} a rank at most, {size_text(sum(host))} over all ranks"
    ranks.print(f"[memory] {stage}: {text}" + (f"; GPU {size_text(max(gpu))} at most" if on_gpu else ""))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not allocate, on the GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)


def _host_peak_bytes() -> int:
    """VmHWM, since the mark was last forgotten."""
    for line in _STATUS.read_text().splitlines() if _STATUS.is_file() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
