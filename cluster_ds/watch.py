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
STOP_FILE = "CLUSTER_DS_STOP_FILE"  # names a file that asks for a stop by being there, at once if it says "now"
JOB_PID = "CLUSTER_DS_JOB_PID"  # the job script's process
_POLL_S = 0.5
_PATIENCE_S = 3.0  # for the other ranks' reports of a hang
_GRACE_S = 120.0  # for a checkpoint after the launcher has gone
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

    def __init__(self, rank: int = 0, world_size: int = 1, connect: Callable[[], Any] | None = None):
        """`connect` makes a client of the job's store of this thread's own."""
        self.rank, self.world_size = rank, world_size
        self.requested: str | None = None
        self._connect = connect
        self._deferred = False
        self._hang_timeout_s = float("inf")
        self._ticks, self._where, self._since = 0, "", time.monotonic()
        self._interrupted_at = -float("inf")
        self._launcher_gone_at: float | None = None
        self._finished = False
        self._main_thread = threading.get_ident()
        self._parent = os.getppid()
        self._starters = _starters(self._parent)

    def start(self) -> None:
        """Take over the signals; call on the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in _SIGNALS:
            signal.signal(number, _no_action)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # the main thread may sit in C code for long
        threading.Thread(target=self._run, args=(reader,), daemon=True, name="watch").start()

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
        timeout, self._hang_timeout_s = self._hang_timeout_s, float("inf")
        try:
            yield
        finally:
            self.at(self._where)
            self._hang_timeout_s = timeout

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
        if self._deferred and time.monotonic() - self._since > self._hang_timeout_s:
            self._report_hang()

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
        if "LOCAL_RANK" in os.environ and os.getppid() != self._parent:
            self._leave(EXIT_STOPPED, "")
        if not all(map(_is_alive, self._starters)):
            if self._launcher_gone_at is None:
                self._launcher_gone_at = time.monotonic()
                self._request("the end of the deepspeed launcher")
            elif time.monotonic() - self._launcher_gone_at > _GRACE_S:
                self._leave(EXIT_STOPPED, "no step ended since the launcher has gone: leaving without a checkpoint")

    def _siblings_gone(self) -> bool:
        """Whether a rank of this node has ended, under DeepSpeed's launcher."""
        number = int(os.environ.get("LOCAL_SIZE", 0))
        try:
            siblings = psutil.Process(self._parent).children()
            return sum(p.status() != psutil.STATUS_ZOMBIE for p in siblings) < number
        except psutil.Error:
            return True

    def _report_hang(self) -> None:
        """Exchange places with the other ranks, name who is behind, end the job."""
        places: dict[int, tuple[int, str]] = {self.rank: (self._ticks, self._where)}
        exchange = threading.Thread(target=self._exchange, args=(places,), daemon=True)
        exchange.start()
        exchange.join(4 * _PATIENCE_S)  # a frozen rank 0 would keep the store's clients waiting
        silent = [r for r in range(self.world_size) if r not in places]
        last = min(ticks for ticks, _ in places.values())
        behind = sorted(r for r, (ticks, _) in places.items() if ticks == last)
        waited = time.monotonic() - self._since
        if self.rank == min(places):
            named = [f"rank {r} does not answer" for r in silent]
            if not silent and len(behind) < self.world_size:
                named = [f"rank {r} hangs in {places[r][1]}" for r in behind]
            elif not silent:
                named = ["all ranks wait for each other"]
            others = ", ".join(f"rank {r} is in {w}" for r, (_, w) in sorted(places.items()) if silent or r not in behind)
            self._say(
                f"error: no progress for {waited:.0f} s (train.hang_timeout_s): {'; '.join(named)}"
                + (f"; {others}" if others else "") + "; the same command continues from the last checkpoint"
            )
        if self.rank in behind:
            frame = sys._current_frames().get(self._main_thread)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            print(f"[rank {self.rank}] in {self._where}, its stack:\n{stack}", file=sys.stderr, flush=True)
        time.sleep(1)
        self._leave(EXIT_HANGS, "")

    def _exchange(self, places: dict[int, tuple[int, str]]) -> None:
        if self._connect is None or self.world_size == 1:
            return
        store = self._connect()
        store.set(f"cluster_ds/hang/{self.rank}", f"{self._ticks} {self._where}")
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and len(places) < self.world_size:
            for rank in set(range(self.world_size)) - set(places):
                if store.check([f"cluster_ds/hang/{rank}"]):
                    ticks, _, where = store.get(f"cluster_ds/hang/{rank}").decode().partition(" ")
                    places[rank] = (int(ticks), where)
            time.sleep(_POLL_S / 5)

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
        for child in psutil.Process().children(recursive=True):  # a loader's worker may be what hangs
            try:
                child.kill()
            except psutil.Error:
                pass
        os._exit(code)


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


def _is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; a killed one whose parent has not looked yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
