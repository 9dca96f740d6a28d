"""What befalls a job from outside: signals, killed processes, hangs, full disks; the same command then ends as if unbroken.

Every job runs the tiny recipe, pretrained on first use, from one shared cache.
"""

import os
import signal
import subprocess
import time

import psutil
import pytest

from .jobs import ROOT, TIMEOUT_S, finish, log_of, rank_processes, start_job, steps_done, wait_until, weights_hash

pytestmark = pytest.mark.distributed
JOB = (
    "--set", "train.micro_batch_size=1", "--set", "train.epochs=1", "--set", "train.checkpoint_every=100",
    "--set", "evaluate.held_out=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    output = tmp_path_factory.mktemp("faults") / "unbroken"
    finish(start_job(output, *JOB), output)
    return output


def ended(job, processes, timeout_s=60):
    """The job's exit code, once none of its processes is left."""
    code = job.wait(timeout_s)
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not alive, f"processes left behind: {alive}"
    return code


def family(job):
    return psutil.Process(job.pid).children(recursive=True)


def text_of(output):
    return output.with_suffix(".out").read_text()


def then_as_unbroken(output, unbroken, *arguments):
    finish(start_job(output, *JOB, *arguments), output)
    assert weights_hash(output) == weights_hash(unbroken)
    assert log_of(output, "step", "loss", "lr") == log_of(unbroken, "step", "loss", "lr")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_becomes_a_checkpoint_of_all(unbroken, number):
    output = unbroken.parent / f"signal_{number.name}"
    job = start_job(output, *JOB)
    wait_until(job, lambda: steps_done(output) >= 2)
    processes = family(job)
    rank_processes(job)[1].send_signal(number)
    assert ended(job, processes) == 75
    text = text_of(output)
    done = steps_done(output)
    assert f"stopping ({number.name}): a checkpoint follows" in text
    assert f"stopped behind step {done}, its checkpoint is written: the same command continues (exit code 75)" in text
    assert (output / "checkpoints" / f"step-{done:08d}" / "manifest.json").is_file() and "Traceback" not in text
    assert f"Cut short behind step {done} of " in (output / "training.html").read_text()
    then_as_unbroken(output, unbroken)
    assert f"[train] resuming behind step {done}" in text_of(output)
    assert "Cut short" not in (output / "training.html").read_text()


def test_a_loss_that_is_not_finite_is_said_and_shown(unbroken):
    output = unbroken.parent / "diverged"
    job = start_job(output, *JOB, "--set", "train.lr=1e30")
    assert ended(job, family(job), TIMEOUT_S) not in (0, 75)
    done, page = steps_done(output), (output / "training.html").read_text()
    assert done > 1 and f"\nerror: step {done}: loss " in text_of(output)  # of rank 0
    assert f"Cut short behind step {done} of " in page and f": step {done}: loss " in page


@pytest.mark.slow
def test_sigterm_to_the_launcher(unbroken):
    """DeepSpeed's launcher passes it on to the ranks one after the other; they agree and leave together."""
    output = unbroken.parent / "launcher_sigterm"
    job = start_job(output, *JOB)
    wait_until(job, lambda: steps_done(output) >= 2)
    processes = family(job)
    launcher = rank_processes(job)[0].parent()
    launcher.terminate()
    assert ended(job, processes) != 0
    assert "stopped behind step" in text_of(output)
    then_as_unbroken(output, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["runner", "launcher"])
def test_kill_9_of_the_launcher_leaves_no_process(unbroken, which):
    output = unbroken.parent / f"kill_{which}"
    job = start_job(output, *JOB)
    wait_until(job, lambda: steps_done(output) >= 2)
    processes = family(job)
    victim = psutil.Process(job.pid) if which == "runner" else rank_processes(job)[0].parent()
    victim.kill()
    ended(job, processes)
    if which == "runner":  # its launcher and ranks are alive still, and have time for a checkpoint
        assert "stopping (the end of the deepspeed launcher)" in text_of(output)
        assert "stopped behind step" in text_of(output)
    then_as_unbroken(output, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_on_a_job_script(unbroken, times):
    """SIGINT to the foreground process group, as a terminal sends it; no traceback, no process left, and it continues."""
    output = unbroken.parent / f"ctrl_c_{times}"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with output.with_suffix(".out").open("w") as log:
        job = subprocess.Popen(
            ["bash", str(ROOT / "recipes" / "tiny.sh"), *JOB, "--output_dir", str(output)], stdout=log,
            stderr=subprocess.STDOUT, env=environment, process_group=0,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a test run in the background ignores
        )
    wait_until(job, lambda: steps_done(output) >= 2)
    processes = family(job)
    for _ in range(times):
        os.killpg(job.pid, signal.SIGINT)
        time.sleep(0.2)
    assert ended(job, processes) == (75 if times == 1 else 130)
    text = text_of(output)
    assert ("stopped behind step" if times == 1 else "interrupted: the same command continues") in text
    assert "Traceback" not in text
    then_as_unbroken(output, unbroken)


@pytest.mark.slow
def test_a_dead_loader_worker(unbroken):
    output = unbroken.parent / "worker"
    job = start_job(output, *JOB, "--set", "train.num_workers=1", "--set", "train.checkpoint_every=2")
    wait_until(job, lambda: steps_done(output) >= 3)
    processes = family(job)
    workers = [p for rank in rank_processes(job) for p in rank.children()]
    assert len(workers) == 2
    workers[1].kill()
    assert ended(job, processes) not in (0, 75)
    text = text_of(output)
    assert "error on rank 1: a data loader worker died (DataLoader worker (pid" in text and "Traceback" not in text
    then_as_unbroken(output, unbroken, "--set", "train.num_workers=1", "--set", "train.checkpoint_every=2")


@pytest.mark.slow
def test_a_hung_rank_is_named_with_its_place_and_stack(unbroken):
    """Rank 1's loader waits for a worker that is stopped."""
    output = unbroken.parent / "hung"
    hang = ("--set", "train.num_workers=1", "--set", "train.hang_timeout_s=15", "--set", "train.checkpoint_every=2")
    job = start_job(output, *JOB, *hang)
    wait_until(job, lambda: steps_done(output) >= 2)
    processes = family(job)
    rank_processes(job)[1].children()[0].suspend()
    assert ended(job, processes) != 0
    text = text_of(output)
    assert "error: no progress for 15 s (train.hang_timeout_s): rank 1 hangs in step" in text
    assert "loading a micro-batch; rank 0 is in step" in text
    assert "[rank 1] in step" in text and "in _timed" in text  # its stack
    then_as_unbroken(output, unbroken, "--set", "train.num_workers=1", "--set", "train.checkpoint_every=2")


@pytest.mark.slow
def test_a_frozen_rank_is_named(unbroken):
    output = unbroken.parent / "frozen"
    job = start_job(output, *JOB, "--set", "train.hang_timeout_s=10")
    wait_until(job, lambda: steps_done(output) >= 2)
    processes = family(job)
    rank_processes(job)[1].suspend()
    assert ended(job, processes, 120) != 0
    text = text_of(output)
    assert "(train.hang_timeout_s): rank 1 does not answer; rank 0 is in step" in text


@pytest.mark.slow
def test_a_second_job_in_the_same_folder_says_so(unbroken):
    output = unbroken.parent / "shared"
    first = start_job(output, *JOB, "--set", "train.epochs=9")  # until the second has started
    wait_until(first, lambda: (output / ".lock").is_file())
    second = subprocess.run(
        ["bash", str(ROOT / "recipes" / "tiny.sh"), *JOB, "--output_dir", str(output)], capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )
    assert second.returncode == 2
    assert f"error: {output} is in use by process" in second.stderr and "Traceback" not in second.stderr
    finish(first, output)
