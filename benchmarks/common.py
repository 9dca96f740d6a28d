"""What the benchmarks share: contestants in alternation, peak memory, a table and a JSON file."""

import ctypes
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from cluster_ds.messages import show_table


def alternate(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each contestant, one after the other in every round; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, work in contestants.items():
            started = time.perf_counter()
            work()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {
        name: {"median_s": statistics.median(values), "least_s": min(values), "most_s": max(values), "rounds": rounds}
        for name, values in seconds.items()
    }


def median_ratio(times: dict[str, dict[str, float]], name: str, to: str) -> float:
    return times[name]["median_s"] / times[to]["median_s"]


class Peak:
    """Anonymous memory: bytes at the start, and the most that was seen since."""

    def __init__(self) -> None:
        self.start = self.most = anonymous_bytes()

    @property
    def above(self) -> int:
        return self.most - self.start


@contextmanager
def peak_anonymous(interval_s: float = 0.005):
    """Watch this process's anonymous memory (file-backed pages of memory maps are not in it)."""
    ctypes.CDLL(None).malloc_trim(0)
    peak, done = Peak(), threading.Event()

    def watch() -> None:
        while not done.wait(interval_s):
            peak.most = max(peak.most, anonymous_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def anonymous_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def machine() -> dict[str, object]:
    with open("/proc/cpuinfo") as file:
        name = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.processor())
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "numpy": np.__version__}


def show(title: str, columns: list[str], rows: list[list[object]]) -> None:
    text = [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row] for row in rows]
    show_table(title, text, columns)


def write(path: Path | None, result: dict) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**result, "machine": machine()}, indent=1) + "\n")
        print(f"written to {path}")


def claim(text: str, holds: bool) -> bool:
    """Print whether what the documents say of this benchmark held in this run."""
    print(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}")
    return holds


def clustered_file(path: Path, n: int, d: int, num_centers: int = 12, seed: int = 0) -> np.ndarray:
    """Unit vectors float16 [n, d] on disk in clusters of Zipf-distributed sizes, three quarters of the noise in d / 4 of
    the coordinates; made once."""
    if not path.is_file():
        rng = np.random.default_rng(seed)
        centers = rng.normal(size=(num_centers, d)).astype(np.float32)
        shares = 1 / np.arange(1, num_centers + 1)
        spread = np.where(np.arange(d) < d // 4, 1.0, 0.3).astype(np.float32)
        part = path.with_name(f"{path.stem}.part.npy")
        out = np.lib.format.open_memmap(part, "w+", np.float16, (n, d))
        for start in range(0, n, 8192):
            size = min(8192, n - start)
            x = 0.6 * centers[rng.choice(num_centers, size, p=shares / shares.sum())]
            x += rng.standard_normal((size, d), dtype=np.float32) * spread
            out[start : start + size] = x / np.linalg.norm(x, axis=1, keepdims=True)
        out.flush()
        part.rename(path)
    return np.load(path, mmap_mode="r")
