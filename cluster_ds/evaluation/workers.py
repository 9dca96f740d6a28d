"""Work on every GPU at once: one process each, or this one where one is enough."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_POLL_S = 1.0
Job = Callable[[Any, Sequence[Any], torch.device], Iterator[Any]]


def run_parallel(job: Job, shared: Any, items: Sequence[Any], num_workers: int | None) -> Iterator[Any]:
    """Results of `job(shared, items, device)` as they come, one an item, in no order.

    Args:
        job: a module's function, which yields one result an item.
        shared: its first argument, the same everywhere.
        items: dealt out in turn.
        num_workers: processes; None is one for each visible GPU, or one on the CPU.
    Raises:
        ValueError: a worker's own, or that one has died.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = min(num_workers or max(gpus, 1), len(items))
    if number <= 1:
        yield from job(shared, items, torch.device("cuda", 0) if gpus else torch.device("cpu"))
        return
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    threads = max(1, torch.get_num_threads() // number)
    workers = [
        context.Process(
            target=_work_off, args=(job, shared, items[i::number], i % gpus if gpus else None, threads, results), daemon=True
        )
        for i in range(number)
    ]
    for worker in workers:
        worker.start()
    try:
        for _ in items:
            yield _next(results, workers)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _next(results: Any, workers: list[Any]) -> Any:
    while True:
        try:
            ok, value = results.get(timeout=_POLL_S)
        except queue.Empty:
            dead = [worker.exitcode for worker in workers if worker.exitcode]
            if dead:
                raise ValueError(
                    f"a worker process has ended with code {dead[0]} (a negative one is a signal's number; -9 is often want "
                    "of memory): the same command continues from what is finished"
                ) from None
            continue
        if not ok:
            raise ValueError(value)
        return value


def _work_off(job: Job, shared: Any, items: Sequence[Any], gpu: int | None, threads: int, results: Any) -> None:
    torch.set_num_threads(threads)
    try:
        for result in job(shared, items, torch.device("cpu") if gpu is None else torch.device("cuda", gpu)):
            results.put((True, result))
    except ValueError as error:
        results.put((False, str(error)))
