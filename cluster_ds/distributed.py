"""Ranks: who we are, and how the ranks of a job wait for each other.

Rank 0's long work (reading data, clustering) is awaited by polling the process group's key-value store, never inside a
collective that would time out. Beside the engine this is the only module that touches a process group.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from .files import write_text
from .watch import Stopped, Watch

T = TypeVar("T")
_POLL_S = 0.1
_FAILED = "cluster_ds/failed"
_DEFAULT_PORT = 29500  # DeepSpeed's, when the user names none


class PeerError(RuntimeError):
    """Another rank failed while this one waited; it reports the reason itself."""


class Ranks:
    """This process among the ranks of the job.

    Attributes:
        rank, world_size, local_rank: 0, 1, 0 without a launcher.
        watch: of this rank; it watches once it is started.
        device: where this rank computes.
    """

    def __init__(self, rank: int, world_size: int, local_rank: int, store: Any = None):
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.device = torch.device("cuda", local_rank) if on_gpu() else torch.device("cpu")
        self.watch = Watch(rank, world_size, _store_client, self._tell)
        self._store = store
        self._calls = 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def print(self, *lines: str) -> None:
        """Print on rank 0 only."""
        if self.is_main and lines:
            print(*lines, sep="\n", flush=True)

    def on_main(self, work: Callable[[], T]) -> T:  # collective
        """Run `work` on rank 0 and give its result to every rank.

        Raises:
            PeerError: on the other ranks, if `work` failed on rank 0, where its own error is raised.
        """
        if self.world_size == 1:
            return work()
        key = self._next_key("main")
        if not self.is_main:
            ok, value = pickle.loads(self._wait(key))
            if not ok:
                raise PeerError(value)
            return value
        try:
            value = work()
        except BaseException as error:
            self._store.set(key, pickle.dumps((False, f"rank 0: {error}")))
            raise
        self._store.set(key, pickle.dumps((True, value)))
        return value

    def on_every_node(self, work: Callable[[], T]) -> T:  # collective
        """Run `work`, which keeps what it fetches on disk, on rank 0, then on one rank of each node, then on all."""
        self.on_main(work)
        if self.local_rank == 0 and not self.is_main:
            work()
        self.gather(True)
        return work()

    def gather(self, value: T) -> list[T]:  # collective
        """Every rank's value, in rank order, on every rank; for small values."""
        if self.world_size == 1:
            return [value]
        key = self._next_key("gather")
        self._store.set(f"{key}/{self.rank}", pickle.dumps(value))
        return [pickle.loads(self._wait(f"{key}/{r}")) for r in range(self.world_size)]

    def shares(self, number: int) -> Iterator[int]:  # collective
        """Numbers below `number`, each on one rank alone: whoever is free takes the next.

        Every rank must call this, though a rank may find nothing left.
        """
        key = self._next_key("shares")  # now, and not when the first number is asked for

        def taken() -> Iterator[int]:
            while (item := self._at_store(lambda: self._store.add(key, 1)) - 1) < number:
                yield item

        return iter(range(number)) if self.world_size == 1 else taken()

    def _next_key(self, kind: str) -> str:
        self._calls += 1
        return f"cluster_ds/{kind}/{self._calls}"

    def _wait(self, key: str) -> bytes:
        while not self._at_store(lambda: self._store.check([key])):
            time.sleep(_POLL_S)
        return self._at_store(lambda: self._store.get(key))

    def _at_store(self, work: Callable[[], T]) -> T:
        """What `work` finds in the store, unless a rank has failed."""
        try:
            found = work()
            if self._store.check([_FAILED]):
                raise PeerError(self._store.get(_FAILED).decode())
            return found
        except dist.DistNetworkError:
            raise PeerError("rank 0, which hosts the store, has left") from None

    def _tell(self, text: str) -> None:
        if self._store is not None:
            self._store.set(_FAILED, f"rank {self.rank}: {text}")

    def tell_failure(self, error: BaseException) -> None:
        """Let ranks that wait for this one know that it will not come."""
        if self._store is not None and not isinstance(error, PeerError):
            self._tell(str(error))
            if self.is_main:  # the store goes with this rank: leave the others a moment to read
                time.sleep(10 * _POLL_S)

    def leave_together(self) -> None:  # collective
        """Rank 0 leaves last: the others still read from its store."""
        if self.world_size > 1:
            self._store.set(f"cluster_ds/left/{self.rank}", b"1")
            for rank in range(1, self.world_size) if self.is_main else ():
                self._wait(f"cluster_ds/left/{rank}")


def is_peer_gone(error: BaseException) -> bool:
    """Whether a collective failed because another rank has left it; gloo and NCCL say so in their own words."""
    phrases = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def on_gpu() -> bool:
    """Whether this job computes on GPUs; DS_ACCELERATOR=cpu keeps it, as it keeps DeepSpeed, on the CPU."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


@contextmanager
def ranks_of_job() -> Iterator[Ranks]:
    """Join the job that the launcher's environment describes, and leave it at the end.

    Without a launcher this is one process with no process group. A rank dies with the launcher that started it.
    """
    _die_with_parent()
    prepare_extensions()
    if "RANK" not in os.environ:
        ranks = Ranks(0, 1, 0)
        ranks.watch.start()
        yield ranks
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if on_gpu():
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank} has no GPU: this node shows {torch.cuda.device_count()}; start fewer ranks with "
                "deepspeed --num_gpus"
            )
        torch.cuda.set_device(local_rank)
    else:  # the launchers leave every rank all cores, and the ranks would fight over them
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world_size)))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    agreed = _agree_on_port(rank, world_size)
    try:
        dist.init_process_group("nccl" if on_gpu() else "gloo", timeout=timedelta(minutes=_timeout_minutes()))
    except dist.DistNetworkError as error:  # several nodes: only the first one's rank 0 can find this out
        raise ValueError(
            f"no connection at {os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}: if it is in use, "
            f"choose another with deepspeed --master_port ({str(error).splitlines()[0]})"
        ) from error
    try:
        ranks = Ranks(rank, world_size, local_rank, dist.distributed_c10d._get_default_store())
        ranks.watch.start()
        ranks.gather(True)
        if agreed is not None and rank == 0:  # all have read it
            agreed.unlink(missing_ok=True)
        try:
            yield ranks
        except Stopped:
            ranks.watch.stop_in_order()
            ranks.leave_together()
            raise
        except BaseException as error:
            ranks.tell_failure(error)
            raise
        ranks.leave_together()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _agree_on_port(rank: int, world_size: int) -> Path | None:
    """Under DeepSpeed's launcher on one node: settle MASTER_PORT before any rank could join a stranger's job.

    The launcher hands out 29500 when the user names no port, so two jobs on a machine would meet. Then rank 0 takes a free
    one; a port that the user names must be free. The ranks learn of it through a file named after their launcher.

    Returns:
        the file.
    Raises:
        ValueError: if the port that the user gave is taken.
    """
    if int(os.environ.get("LOCAL_SIZE", 0)) != world_size or "MASTER_PORT" not in os.environ:
        return None  # several nodes, or another launcher
    launcher = psutil.Process(os.getppid())
    given = launcher.environ().get("MASTER_PORT")  # the launcher does not look at it
    port = int(os.environ["MASTER_PORT"])
    if port == _DEFAULT_PORT and given is not None:
        port = int(given)
    name = f"cluster_ds-{os.getuid()}-{launcher.pid}-{launcher.create_time():.2f}.port"
    path = Path(tempfile.gettempdir(), name)
    if rank == 0:
        if port == _DEFAULT_PORT:
            port = free_port()
        elif not _is_free(port):
            write_text(path, "taken")
            time.sleep(10 * _POLL_S)  # the others are about to read it
            path.unlink()
            raise ValueError(
                f"port {port} (MASTER_PORT, or deepspeed --master_port) is in use on {socket.gethostname()}: choose "
                "another, or leave it out to get a free one"
            )
        write_text(path, str(port))
    else:
        deadline = time.monotonic() + 60 * _timeout_minutes()
        while not path.is_file():
            if time.monotonic() > deadline:
                raise ValueError(f"rank 0 has not named a port in {path}")
            time.sleep(_POLL_S)
        if path.read_text() == "taken":
            raise PeerError("rank 0: the port is taken")
        port = int(path.read_text())
    os.environ["MASTER_PORT"] = str(port)
    return path


def free_port() -> int:
    """A port on which nobody listens on this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does: a port in TIME_WAIT is free
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _store_client() -> Any:
    """A client of the job's store of its own: the main thread may be waiting with the other one."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False,
        timeout=timedelta(seconds=5),
    )


def ensure_process_group(ranks: Ranks) -> None:
    """A process group of one for a run without a launcher; DeepSpeed needs one."""
    if ranks.world_size == 1 and not dist.is_initialized():
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        dist.init_process_group("nccl" if ranks.device.type == "cuda" else "gloo")


def assert_ranks_agree(facts: dict[str, int | str], device: torch.device) -> None:  # collective
    """Refuse to start when ranks would run different plans or different numbers of micro-batches.

    Raises:
        ValueError: naming the facts that differ.
    """
    numbers = [hash_to_int(v) if isinstance(v, str) else v for v in facts.values()]
    least, most = (torch.tensor(numbers, dtype=torch.int64, device=device) for _ in range(2))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)  # collective
    dist.all_reduce(most, op=dist.ReduceOp.MAX)  # collective
    unequal = [name for name, same in zip(facts, (least == most).tolist(), strict=True) if not same]
    if unequal:
        mine = ", ".join(f"{name}={facts[name]}" for name in unequal)
        raise ValueError(f"ranks disagree about {', '.join(unequal)} (rank {dist.get_rank()} has {mine})")


def hash_to_int(text: str) -> int:
    """The first 60 bits of a hexadecimal hash."""
    return int(text[:15], 16)


def prepare_extensions() -> None:
    """Point DeepSpeed's just-in-time builds at a private folder, so that others' stale locks cannot hang us."""
    import deepspeed

    private = Path.home() / ".cache" / "cluster_ds" / "extensions" / f"torch{torch.__version__}-ds{deepspeed.__version__}"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(private))


def build_cpu_communication() -> None:
    """Compile DeepSpeed's CPU communication op once per machine, before ranks would wait for it.

    torch's build lock is a bare file: a build that was killed leaves it, and every later run would wait for it without a
    word. Our builds run under a lock that the kernel releases, so a lock file found inside it is stale.
    """
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    prepare_extensions()
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".cluster_ds.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for lock in folder.glob("*/lock"):
            if "cluster_ds" not in folder.parts:
                raise ValueError(
                    f"{lock} is {time.time() - lock.stat().st_mtime:.0f} s old: another program compiles there, or was "
                    "killed doing so; delete the file if none runs, or unset TORCH_EXTENSIONS_DIR to use a private folder"
                )
            print(f"removing the stale build lock {lock} (a build was killed)", file=sys.stderr, flush=True)
            lock.unlink()
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None:
            builder.load(verbose=False)


def forget_shared_buffers() -> None:  # collective
    """Unlink the buffers that DeepSpeed's CPU op keeps in shared memory, once every rank has mapped them.

    It never does so itself: 69 MB a rank and port would stay in memory after every run, whatever its end.
    """
    dist.barrier()  # collective
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    mine = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{dist.get_rank()}"
    Path("/dev/shm", mine).unlink(missing_ok=True)


def _timeout_minutes() -> int:
    return int(os.environ.get("DEEPSPEED_TIMEOUT", 30))


def _die_with_parent() -> None:
    """Ask Linux to end this rank when its launcher is killed, so that no orphan keeps a GPU."""
    if sys.platform == "linux" and "LOCAL_RANK" in os.environ:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
