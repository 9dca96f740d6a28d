"""Run a function on real ranks, of gloo if nothing else is said, and collect what it returns."""

import os
import pickle
import socket
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from ..forked import FORKED

TIMEOUT_S = 420


def run_on_ranks(function, world_size: int, *args, backend: str = "gloo") -> list:
    """function(rank, world_size, *args) in `world_size` fresh processes; results in rank order.

    Raises:
        AssertionError: with the traceback of a rank that failed, or when the ranks did not end in time.
    """
    from cluster_ds.distributed import build_cpu_communication

    build_cpu_communication()  # once, before ranks would wait for the compiler
    with tempfile.TemporaryDirectory() as folder:
        # Where DeepSpeed would have asked a GPU before the fork, libraries are loaded by each rank.
        context: Any = mp.get_context("spawn") if torch.cuda.is_available() else FORKED
        port = free_port()
        processes = [
            context.Process(target=_rank, args=(function, rank, world_size, folder, port, backend, dict(os.environ), _Streams(), args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(TIMEOUT_S)
            alive = [r for r, p in enumerate(processes) if p.is_alive()]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
        left = [path.name for path in Path("/dev/shm").glob(f"deepspeed_*_{port}_*")]
        assert not left, f"shared memory that outlives the job: {left}"
        results = []
        for rank, process in enumerate(processes):
            file = Path(folder) / f"result-{rank}"
            ok, value = pickle.loads(file.read_bytes()) if file.is_file() else (False, f"exit code {process.exitcode}")
            assert ok, f"rank {rank} (still running: {alive}): {value}"
            results.append(value)
        return results


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Streams:
    """Standard output and error of the process that starts ranks, which a forked one does not inherit."""

    def __getstate__(self):
        return [DupFd(stream) for stream in (1, 2)]

    def __setstate__(self, descriptors):
        for stream, descriptor in zip((1, 2), descriptors, strict=True):
            os.dup2(descriptor.detach(), stream)


def _rank(function, rank, world_size, folder, port, backend, environment, _, args) -> None:
    os.environ.clear()
    os.environ.update(
        environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu" if backend == "gloo" else "cuda",
    )
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = (True, function(rank, world_size, *args))
    except BaseException:
        result = (False, traceback.format_exc())
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
