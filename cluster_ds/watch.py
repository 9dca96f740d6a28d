"""Beside the stages: what befalls a rank from outside, watched by one thread of it.

Signals: SIGTERM, SIGUSR1 (or a stop file, see launch/job.sh) and the first Ctrl-C let training finish its step; all ranks
agree there, write a checkpoint and leave with EXIT_STOPPED, which a scheduler may requeue. Outside of training everything
finished is on disk already, so a rank leaves at once.

A launcher that was killed: the ranks notice and leave in the same way. A rank that hangs: when training makes no progress
for a set time, the rank that is behind is named with its place and its stack, and the job ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: in good order, and worth another try
EXIT_HANGS = 1
LOADING = "loading a micro-batch"  # the place where a rank waits for nobody else
STOP_FILE = "CLUSTER_DS_STOP_FILE"  # names a file that asks for a stop by being there, at once if it says "now"
JOB_PID = "CLUSTER_DS_JOB_PID"  # the job script's process
_POLL_S = 0.5
_ANSWER_S = 2.0  # a rank that is asked where it is answers within this time
_PATIENCE_S = 8.0  # for the other ranks' answers
_GRACE_S = 120.0  # without progress, after the launcher has gone
_ASKED = "cluster_ds/hang/asked"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(Exception):  # noqa: N818 - not an error
    """Training was asked to stop and has done so, with a checkpoint behind `step`."""

    def __init__(self, step: int):
        super().__init__(step)
        self.step = step


class Watch:
    """The watching thread of a rank; does nothing until `start`.

    Attributes:
        requested: why training is to stop at the next boundary; None while it is not.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, connect: Callable[[], Any] | None = None,
        tell: Callable[[str], None] | None = None,
    ):
        """`connect` makes a client of the job's store; `tell` lets waiting ranks know that this one will not come."""
        self.rank, self.world_size = rank, world_size
        self.requested: str | None = None
        self._connect, self._tell = connect, tell
        self._has_launcher = "LOCAL_RANK" in os.environ
        self._deferred = False
        self._hang_timeout_s = float("inf")
        self._unhurried = False
        self._asked_at, self._shown = -float("inf"), False
        self._ticks, self._where, self._since = 0, "", time.monotonic()
        self._interrupted_at = -float("inf")
        self._launcher_gone_at: float | None = None
        self._finished = False
        self._main_thread = threading.get_ident()
        self._parent = os.getppid()
        self._starters = _starters(self._parent)
        under_deepspeed = "LOCAL_SIZE" in os.environ  # set by its launcher
        self._came_late = under_deepspeed and (is_orphan(os.getpid()) or is_orphan(self._parent))

    def start(self) -> None:
        """Take over the signals; call on the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in _SIGNALS:
            signal.signal(number, _no_action)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # the main thread may sit in C code for long
        threading.Thread(target=self._run, args=(reader,), daemon=True, name="watch").start()
        if self.world_size > 1 and self._connect is not None:
            threading.Thread(target=self._answer, daemon=True, name="watch-answers").start()

    def at(self, where: str) -> None:
        """Note progress of the main thread."""
        self._ticks, self._where, self._since = self._ticks + 1, where, time.monotonic()

    @contextmanager
    def deferring(self, hang_timeout_s: float) -> Iterator[None]:
        """Requests to stop wait for the caller, who looks at `requested`; the lack of progress is watched."""
        self._hang_timeout_s = hang_timeout_s
        self.at("start of training")
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            if self.requested and sys.exc_info()[1] is None:  # asked for behind the last step
                self._leave(EXIT_STOPPED, f"stopped by {self.requested}")

    @contextmanager
    def unhurried(self) -> Iterator[None]:
        """No progress is expected here: a checkpoint may take long."""
        self._unhurried = True
        try:
            yield
        finally:
            self.at(self._where)
            self._unhurried = False

    def stop_in_order(self) -> None:
        """The checkpoint is written: signals no longer matter, and who asked through a file is told."""
        self._deferred = False
        self._finished = True
        self._answer_stop_file()

    def _answer_stop_file(self) -> None:
        path = os.environ.get(STOP_FILE)
        if path and self.rank == 0:
            Path(path).write_text("stopped\n")

    def _run(self, reader: int) -> None:
        while True:
            try:
                self._look(reader)
            except Exception:  # signals must be heard whatever happens here
                traceback.print_exc()
                time.sleep(_POLL_S)

    def _look(self, reader: int) -> None:
        if select.select([reader], [], [], _POLL_S)[0]:
            for number in os.read(reader, 64):
                self._on_signal(number)
        self._look_at_launcher()
        path = os.environ.get(STOP_FILE)
        if self.rank == 0 and path and os.path.exists(path):
            if "now" in Path(path).read_text().split():
                self._leave(130, "interrupted: the same command continues from what is finished")
            if self.requested is None:
                self._request("the job script")
        silent_s = time.monotonic() - self._since
        if self._deferred and not self._unhurried and silent_s > self._hang_timeout_s:
            self._ask_around(silent_s)

    def _on_signal(self, number: int) -> None:
        if number not in _SIGNALS or self._finished:
            return
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            again = self.requested is not None and time.monotonic() - self._interrupted_at > 1
            if not self._deferred or again:
                self._leave(130, "interrupted: the same command continues from what is finished")
            self._interrupted_at = time.monotonic()
        self._request(name)

    def _request(self, why: str) -> None:
        if self._finished:
            return
        if self._siblings_gone():  # another rank has failed and said why; this is the launcher cleaning up
            self._leave(EXIT_STOPPED, "")
        if not self._deferred:
            self._answer_stop_file()
            self._leave(EXIT_STOPPED, f"stopped by {why}: the same command continues from what is finished")
        if self.requested is None:
            self.requested = why
            again = "; Ctrl-C again leaves now" if why == "SIGINT" else ""
            if self.rank == 0 or why != "SIGINT":  # a terminal interrupts all of them
                self._say(f"stopping ({why}): a checkpoint follows at the end of this step{again}")

    def _look_at_launcher(self) -> None:
        if self._has_launcher and os.getppid() != self._parent:
            self._leave(EXIT_STOPPED, "")
        if self._came_late or not all(map(_is_alive, self._starters)):
            if self._launcher_gone_at is None:
                self._launcher_gone_at = time.monotonic()
                self._request("the end of the deepspeed launcher")
            elif not self._unhurried and time.monotonic() - max(self._launcher_gone_at, self._since) > _GRACE_S:
                self._leave(EXIT_STOPPED, "no progress since the launcher has gone: leaving without a checkpoint")

    def _siblings_gone(self) -> bool:
        """Whether a rank of this node has ended, under DeepSpeed's launcher."""
        number = int(os.environ.get("LOCAL_SIZE", 0))
        try:
            siblings = psutil.Process(self._parent).children()
            return sum(p.status() != psutil.STATUS_ZOMBIE for p in siblings) < number
        except psutil.Error:
            return True

    def _ask_around(self, silent_s: float) -> None:
        """No progress here for long: find out whether another rank hangs, or this one; then name it and end the job.

        A rank that waits in a collective for others who do make progress is merely early.
        """
        if time.monotonic() - self._asked_at < self._hang_timeout_s / 4:
            return
        self._asked_at = time.monotonic()
        places: dict[int, tuple[int, float, str]] = {self.rank: (self._ticks, silent_s, self._where)}
        exchange = threading.Thread(target=self._exchange, args=(places,), daemon=True)
        exchange.start()
        exchange.join(2 * _PATIENCE_S)  # a frozen rank 0 keeps the store's clients waiting
        silent = [r for r in range(self.world_size) if r not in places]
        stuck = {r: place for r, place in places.items() if place[1] >= self._hang_timeout_s / 2}
        loading = [r for r, (_, _, where) in stuck.items() if where.endswith(LOADING)]
        if len(stuck) + len(silent) < self.world_size and not loading:
            return
        behind = silent or min_ticks(loading, places) or min_ticks(list(stuck), places)
        if self._is_first(places):
            named = [
                f"rank {r} " + ("does not answer" if r in silent else f"hangs in {places[r][2]}") for r in behind
            ] if len(behind) < self.world_size else ["all ranks wait for each other"]
            others = ", ".join(f"rank {r} is in {where}" for r, (_, _, where) in sorted(places.items()) if r not in behind)
            self._say(
                f"error: no progress for {silent_s:.0f} s (train.hang_timeout_s): {'; '.join(named)}"
                + (f"; {others}" if others else "") + "; the same command continues from the last checkpoint"
            )
        if self.rank in behind:
            self._show_stack()
        time.sleep(_ANSWER_S + _POLL_S)  # the launcher ends all when one leaves; others may have something to show
        self._leave(EXIT_HANGS, "")

    def _is_first(self, places: dict[int, tuple[int, float, str]]) -> bool:
        """Whether this rank is to speak: the first to know, or the lowest that answers if the store is out of reach."""
        order: list[int] = []
        if self._connect is not None and self.world_size > 1:
            connect = self._connect
            asking = threading.Thread(target=lambda: order.append(connect().add("cluster_ds/hang/told", 1)), daemon=True)
            asking.start()
            asking.join(_ANSWER_S)
        return order[0] == 1 if order else self.rank == min(places)

    def _show_stack(self) -> None:
        if self._shown:
            return
        self._shown = True
        frame = sys._current_frames().get(self._main_thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        print(f"[rank {self.rank}] in {self._where}, its stack:\n{stack}", file=sys.stderr, flush=True)

    def _exchange(self, places: dict[int, tuple[int, float, str]]) -> None:
        """Ask every rank where it is; answers come into `places`."""
        if self._connect is None or self.world_size == 1:
            return
        try:
            store = self._connect()
            number = store.add(_ASKED, 1)
            deadline = time.monotonic() + _PATIENCE_S
            while time.monotonic() < deadline and len(places) < self.world_size:
                for rank in set(range(self.world_size)) - set(places):
                    if store.check([f"{_ASKED}/{rank}"]):
                        answered, ticks, silent_s, where = store.get(f"{_ASKED}/{rank}").decode().split(" ", 3)
                        if int(answered) >= number:  # else it is the answer to an earlier question
                            places[rank] = (int(ticks), float(silent_s), where)
                time.sleep(_POLL_S / 5)
        except RuntimeError:  # rank 0, which hosts the store, has left or is frozen
            return

    def _answer(self) -> None:
        """In a thread of its own: answer ranks that ask where this one is; show the stack if it is stuck itself."""
        assert self._connect is not None
        answered = 0
        try:
            store = self._connect()
            while True:
                time.sleep(_ANSWER_S)
                if not self._deferred or self._unhurried or not store.check([_ASKED]):
                    continue
                number = int(store.get(_ASKED))
                if number == answered:
                    continue
                answered, silent_s = number, time.monotonic() - self._since
                store.set(f"{_ASKED}/{self.rank}", f"{number} {self._ticks} {silent_s} {self._where}")
                if silent_s >= self._hang_timeout_s / 2 and self._where.endswith(LOADING):
                    self._show_stack()
        except RuntimeError:  # the store has gone with rank 0
            return

    def _say(self, text: str) -> None:
        try:
            print(text if self.rank == 0 else f"[rank {self.rank}] {text}", file=sys.stderr, flush=True)
        except OSError:  # who read our output is gone
            pass

    def _leave(self, code: int, message: str) -> None:
        if message:
            self._say(message)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                pass
        if self._tell is not None and code != EXIT_HANGS:
            telling = threading.Thread(target=self._tell, args=(message or "it was stopped",), daemon=True)
            telling.start()
            telling.join(2)
        for child in psutil.Process().children(recursive=True):  # a loader's worker may be what hangs
            try:
                child.kill()
            except psutil.Error:
                pass
        os._exit(code)


def min_ticks(ranks: list[int], places: dict[int, tuple[int, float, str]]) -> list[int]:
    """Those of some ranks that have made the least progress."""
    least = min((places[r][0] for r in ranks), default=0)
    return sorted(r for r in ranks if places[r][0] == least)


def leave_workers_alone(_: int) -> None:
    """Signals of a loader's worker: its rank decides when it ends (it follows the rank's end by itself)."""
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _no_action(number: int, frame: Any) -> None:
    """Python-level handler: the wake-up descriptor has told the thread already."""


def _starters(parent: int) -> list[psutil.Process]:
    """Who must be there besides our parent: the `deepspeed` command over DeepSpeed's launcher, and the job script."""
    found = []
    try:
        launcher = psutil.Process(parent)
        runner = launcher.parent()
        if "deepspeed.launcher.launch" in launcher.cmdline() and runner is not None:
            found += [runner] if any("deepspeed" in word for word in runner.cmdline()) else []
        if JOB_PID in os.environ and found:  # on this host only
            found.append(psutil.Process(int(os.environ[JOB_PID])))
    except psutil.Error:
        pass
    return found


def is_orphan(pid: int) -> bool:
    """Whether the one who started a process has ended, e.g. while we were still importing.

    Whoever inherits orphans (init, a service manager) is of another session; the head of a session was meant to be alone.
    In a container process 1, maybe the job's script, inherits them, and all are of its session.
    """
    try:
        parent, session = psutil.Process(pid).ppid(), os.getsid(pid)
        if parent == 1 and not any("deepspeed" in word for word in psutil.Process(1).cmdline()):
            return True
        return parent != 0 and session != pid and os.getsid(parent) != session  # 0: outside of this container
    except psutil.AccessDenied:  # it is there, and none of our business
        return False
    except (psutil.Error, ProcessLookupError):
        return True


def _is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; a killed one whose parent has not looked yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
