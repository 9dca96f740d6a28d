"""Start, watch, kill and compare real `deepspeed launch/train.py` jobs on CPU ranks."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from .ranks import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 300


def start_job(
    output_dir: Path, *arguments: str, recipe: str = "tiny", num_ranks: int = 2, script: str = "train.py",
    port: int | None = 0, environment: dict[str, str] | None = None,
):
    """A running job; its output goes to a file beside `output_dir`. Port 0: one that is free, None: none is given."""
    log = output_dir.with_suffix(".out").open("a")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", **(environment or {})}
    command = [
        str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(num_ranks),
        *([] if port is None else ["--master_port", str(port or free_port())]), str(ROOT / "launch" / script), "--recipe", recipe, "--output_dir", str(output_dir), *arguments,
    ]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=output_dir.parent)


def finish(job, output_dir: Path) -> str:
    """Wait for a job that must succeed; returns everything that runs into this folder have printed."""
    code = job.wait(TIMEOUT_S)
    text = output_dir.with_suffix(".out").read_text()
    assert code == 0, f"exit code {code}\n{text[-6000:]}"
    return text


def rank_processes(job) -> list[psutil.Process]:
    """The ranks of a job, by rank."""
    found = {}
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            if process.cmdline() == process.parent().cmdline():  # a loader's worker, forked from its rank
                continue
            for argument in process.cmdline():
                if argument.startswith("--local_rank="):
                    found[int(argument.split("=")[1])] = process
        except psutil.NoSuchProcess:
            continue
    return [found[r] for r in sorted(found)]


def steps_done(output_dir: Path) -> int:
    log = output_dir / "log.jsonl"
    return len(log.read_text().splitlines()) if log.is_file() else 0


def wait_until(job, condition) -> None:
    """Return as soon as `condition()` holds; the job must still run."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert job.poll() is None, f"the job ended with {job.poll()} before its moment came"
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.0005)


def kill_rank_when(job, rank: int | None, condition) -> None:
    """kill -9 one rank (None: all) as soon as `condition()` holds; then the whole job must end by itself, with an error."""
    wait_until(job, condition)
    ranks = rank_processes(job)
    for process in ranks if rank is None else [ranks[rank]]:
        os.kill(process.pid, signal.SIGKILL)
    assert job.wait(TIMEOUT_S) != 0
    gone, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive, f"processes left behind: {alive}"


def weights_hash(output_dir: Path) -> str:
    """SHA-256 of the exported weights."""
    files = sorted((output_dir / "model").glob("*.safetensors"))
    assert files, f"no weights in {output_dir / 'model'}"
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def log_of(output_dir: Path, *keys: str) -> list[tuple]:
    entries = [json.loads(line) for line in (output_dir / "log.jsonl").read_text().splitlines()]
    return [tuple(entry[k] for k in keys) for entry in entries]
