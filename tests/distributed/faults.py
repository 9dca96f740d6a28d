"""One run of tiny under kill -9 against an unbroken one: python -m tests.distributed.faults [SEED] [KILLS]

Each start of the same command loses a process of its job (a rank, all of them, the runner, its launcher) in one of its stages;
then everything of the job must end by itself. The last start runs to its end: weights, census and log must be the unbroken run's.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from .jobs import finish, log_of, rank_processes, start_job, steps_done, wait_until, weights_hash

ARGUMENTS = ("--set", "train.checkpoint_every=2", "--set", "evaluate.every=2", "--set", "train.keep_checkpoints=1")
VICTIMS = ("rank 0", "rank 1", "all ranks", "the runner", "the launcher")
STEPS = 10
END_S = 90.0  # within which a broken job must be gone


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(10**6)
    kills = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    rng = random.Random(seed)
    victims = [VICTIMS[i % len(VICTIMS)] for i in range(kills)]
    rng.shuffle(victims)
    with tempfile.TemporaryDirectory() as folder:
        unbroken, broken = Path(folder, "whole", "run"), Path(folder, "broken", "run")
        for output in (unbroken, broken):  # each with a cache of its own
            output.parent.mkdir()
        finish(start_job(unbroken, *ARGUMENTS), unbroken)
        print(f"seed {seed}; unbroken run: {steps_done(unbroken)} steps, weights {weights_hash(unbroken)}", flush=True)
        hits: Counter[str] = Counter()
        for number, victim in enumerate(victims):
            stage, moment = aim(broken, number / kills, rng)
            job = start_job(broken, *ARGUMENTS)
            try:
                wait_until(job, lambda moment=moment, job=job: moment() and len(rank_processes(job)) == 2)
            except AssertionError:
                print(f"waiting for {stage}:", *broken.with_suffix(".out").read_text().splitlines()[-40:], sep="\n")
                raise
            where = kill(job, victim, broken)
            hits[stage] += 1
            print(f"kill {number + 1:2}: {victim:12} in {stage:22} {where}", flush=True)
        text = finish(start_job(broken, *ARGUMENTS), broken)
        print(*[line for line in text.splitlines() if "passed over" in line][-3:], sep="\n")
        print("kills by stage:", ", ".join(f"{stage} {count}" for stage, count in hits.items()))
        print(f"killed {kills} times: {steps_done(broken)} steps, weights {weights_hash(broken)}")
        keys = ("step", "loss", "lr", "grad_norm", "weight_sum", "num_samples")
        same = {
            "weights": weights_hash(broken) == weights_hash(unbroken),
            "census": (broken / "census.jsonl").read_text() == (unbroken / "census.jsonl").read_text(),
            "log": log_of(broken, *keys) == log_of(unbroken, *keys),
            "stages": kills < 30 or hits.keys() >= {"extraction", "clustering", "save", "export"},
            "nothing left": not [p for p in broken.rglob("*.part*") if p.is_file()] and not left_over(folder),
        }
        print(*(f"{name}: {'as it must be' if ok else 'WRONG'}" for name, ok in same.items()), sep="\n")
        sys.exit(not all(same.values()))


def aim(output: Path, progress: float, rng: random.Random) -> tuple[str, Callable[[], bool]]:
    """The stage of the next kill, and what to wait for; `progress` is the share of kills done."""
    checkpoints, cache = output / "checkpoints", output.parent / "cache"
    shards = len(list(cache.glob("proxies/*/*.json")))
    planned, done = (output / "plan").is_dir(), newest(checkpoints)
    if not planned and progress < 0.15 and shards < 14:
        return "extraction", lambda: len(list(cache.glob("proxies/*/*.json"))) > shards
    if not planned and progress < 0.3:
        pause, said = Pause(rng.uniform(0, 0.4)), Said(output, b"[proxies]")
        return "clustering", lambda: len(list(cache.glob("proxies/*/*.json"))) >= 16 and said.is_there() and pause.is_over()
    if (output / "model").is_dir():
        return "reuse", Pause(rng.uniform(0.5, 3.0)).is_over
    if done >= STEPS:
        if progress < 0.95:
            return "export", lambda: any(output.glob("model.*.part"))
        pause = Pause(rng.uniform(0, 0.6))
        return "export and after", lambda: any(output.glob("model.*.part")) and pause.is_over()
    goal = 2 * (done // 2) + 2  # a killed runner's ranks write one in between
    if done < 2 * int((progress - 0.25) * STEPS):  # at .8 of the kills all steps are done
        pause = Pause(rng.uniform(0, 0.5))
        return "step behind a save", lambda: newest(checkpoints) >= goal and pause.is_over()
    kind = ["save", "start", "step", "evaluation"][int(100 * progress) // 3 % 4]
    if kind == "start":
        pause, said = Pause(rng.uniform(0, 4.0)), Said(output, b"[run] recipe")
        return "start", lambda: said.is_there() and pause.is_over()
    if kind == "save":
        target = checkpoints / f"step-{goal:08d}"
        return "save", lambda: target.is_dir() and not (target / "manifest.json").exists()
    if kind == "evaluation":
        return "evaluation or save", lambda: steps_done(output) >= goal
    pause = Pause(rng.uniform(0, 0.3))
    return "step", lambda: steps_done(output) >= done + 1 and pause.is_over()


class Said:
    """Whether the next start has printed a text. Ranks that are still importing do not know yet who has started them."""

    def __init__(self, output: Path, text: bytes):
        self.file, self.text = output.with_suffix(".out"), text
        self.begin = self.file.stat().st_size if self.file.is_file() else 0

    def is_there(self) -> bool:
        return self.text in self.file.read_bytes()[self.begin :]


class Pause:
    """Over some seconds after it is asked for the first time."""

    def __init__(self, seconds: float):
        self.seconds, self.end = seconds, None

    def is_over(self) -> bool:
        self.end = self.end or time.monotonic() + self.seconds
        return time.monotonic() >= self.end


def newest(checkpoints: Path) -> int:
    """The newest finished checkpoint's step, 0 without one."""
    return max((int(p.parent.name[-8:]) for p in checkpoints.glob("step-*/manifest.json")), default=0)


def kill(job, victim: str, output: Path) -> str:
    """kill -9; returns what was there then. The rest of the job must end by itself."""
    runner = psutil.Process(job.pid)
    ranks = rank_processes(job)
    launchers = [p for p in runner.children() if "deepspeed.launcher.launch" in " ".join(p.cmdline())]
    chosen = {"all ranks": ranks, "the runner": [runner], "the launcher": launchers}.get(victim)
    if chosen is None:
        chosen = ranks[int(victim[-1]) :][:1]
    for process in chosen:
        os.kill(process.pid, signal.SIGKILL)
    plan = "" if (output / "plan").is_dir() else "no plan yet, "
    where = f"{plan}step {steps_done(output)} done, newest checkpoint {newest(output / 'checkpoints')}"
    job.wait(END_S)
    deadline = time.monotonic() + END_S
    while left := left_over(str(output)):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
    return where


def left_over(folder: str) -> list[str]:
    """Processes other than this one that name the folder."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if folder in " ".join(process.info["cmdline"] or []) and process.pid != os.getpid():
            found.append(f"{process.pid} {' '.join(process.info['cmdline'])[:200]}")
    return found


if __name__ == "__main__":
    main()
