"""Job scripts for real: a copied recipe that is told to stop before its time is up, and one on two nodes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cluster_ds.catalogue import copy_recipe

from ..test_jobs import SCONTROL, commands
from .jobs import finish, log_of, start_job, steps_done, wait_until, weights_hash
from .ranks import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
JOB = (
    "--set", "train.micro_batch_size=1", "--set", "train.epochs=1", "--set", "train.checkpoint_every=100",
    "--set", "evaluate.held_out=null",
)  # fmt: skip
# Starts one launcher a node, as srun does; both nodes are this host.
SRUN = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    output = tmp_path_factory.mktemp("jobs") / "unbroken"
    finish(start_job(output, *JOB), output)
    return output


@pytest.fixture(scope="module")
def spooled(unbroken):
    """A copied recipe's script as sbatch runs it: under another name, in another folder."""
    copy_recipe("tiny", unbroken.parent / "jobs")
    script = unbroken.parent / "slurm_script"
    script.write_text((unbroken.parent / "jobs" / "tiny.sh").read_text())
    return script


def start(script, output, first, **environment):
    path = os.pathsep.join([first, str(Path(sys.executable).parent), os.environ["PATH"]])
    with output.with_suffix(".out").open("a") as log:
        return subprocess.Popen(
            ["bash", str(script), *JOB, "--output_dir", str(output)], stdout=log, stderr=subprocess.STDOUT, cwd=output.parent,
            env={**os.environ, "PATH": path, "SLURM_SUBMIT_DIR": str(script.parent / "jobs"), "SLURM_JOB_ID": "4711", **environment},
            process_group=0,
        )


def test_usr1_leads_to_a_checkpoint_and_into_the_queue_and_the_next_start_ends_as_unbroken(unbroken, spooled):
    output = unbroken.parent / "requeued"
    first = commands(unbroken.parent / "bin_one", scontrol=SCONTROL)
    job = start(spooled, output, first, MASTER_PORT=str(free_port()))
    wait_until(job, lambda: steps_done(output) >= 2)
    processes = psutil.Process(job.pid).children(recursive=True)
    os.kill(job.pid, signal.SIGUSR1)  # to the script alone, as #SBATCH --signal=B:USR1@300 has it
    assert job.wait(120) == 75
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    text = output.with_suffix(".out").read_text()
    assert "SCONTROL requeue 4711" in text and "stopped behind step" in text and "Traceback" not in text
    assert not (output / "model").exists()
    again = start(spooled, output, first, MASTER_PORT=str(free_port()))
    assert again.wait(300) == 0
    assert "[train] resuming behind step" in output.with_suffix(".out").read_text()
    assert weights_hash(output) == weights_hash(unbroken)
    assert log_of(output, "step", "loss", "lr") == log_of(unbroken, "step", "loss", "lr")


def test_two_nodes_end_as_one(unbroken, spooled):
    """One rank on each of two nodes: started from the allocation, stopped once on the way; each rank has its log."""
    output = unbroken.parent / "two_nodes"
    first = commands(unbroken.parent / "bin_two", scontrol=SCONTROL, srun=SRUN)
    nodes = {
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "NUM_CPU_RANKS": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    job = start(spooled, output, first, **nodes)
    wait_until(job, lambda: steps_done(output) >= 2)
    processes = psutil.Process(job.pid).children(recursive=True)
    os.kill(job.pid, signal.SIGUSR1)
    assert job.wait(120) == 75
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert start(spooled, output, first, **{**nodes, "MASTER_PORT": str(free_port())}).wait(300) == 0
    assert weights_hash(output) == weights_hash(unbroken)
    logs = sorted(path.name.split("_")[-1] for path in (output.parent / "logs" / "4711").glob("*.log"))
    assert logs == ["rank0.log", "rank0.log", "rank1.log", "rank1.log"]
    assert "[train] resuming behind step" in output.with_suffix(".out").read_text()  # rank 0's log is in the job's as well
