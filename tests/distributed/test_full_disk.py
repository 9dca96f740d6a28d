"""A disk that is too small, or fills up in the middle; with more space the same command ends as if nothing had been."""

import os
import subprocess
import sys

import pytest

from .jobs import ROOT, weights_hash

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def in_namespace(folder, *arguments):
    folder.mkdir()
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine does not let us mount a small file system")
    command = [*unshare, sys.executable, "-m", "tests.distributed.full_disk", str(folder), *arguments]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=700)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "Traceback" not in text, text
    return text


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk") / "whole"
    assert "exit code 0" in in_namespace(folder, "1g", "--then")
    return folder.with_name("whole_run")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("300k", "the token cache needs about"),
        ("500k", "extraction needs about"),
        ("20m", r"one checkpoint and the exported model needs about"),
    ],
)
def test_a_small_disk_is_said_beforehand(tmp_path, size, message):
    text = in_namespace(tmp_path / "disk", size)
    assert "exit code 2" in text and f"error: {message}" in text and "are free there: free space, or put it elsewhere" in text


def test_training_goes_on_without_a_checkpoint_if_it_may(tmp_path, unbroken):
    """The disk fills in the middle of the save; what was written of it makes room for the model."""
    text = in_namespace(tmp_path / "disk", "20m", "--blind", "--go_on", "--then")
    first, second = text.split("exit code")[1:3]
    assert first.split()[0] == second.split()[0] == "0"
    assert "the checkpoint of step 5 was not kept: " in text and "training goes on (train.full_disk)" in text
    assert "left over: nothing" in text and "reused the finished model" in second + text.split("exit code")[1]
    assert weights_hash(tmp_path / "disk_run") == weights_hash(unbroken)


@pytest.mark.parametrize(("size", "stage"), [("500k", "extraction"), ("20m", "save"), ("42m", "export")])
def test_a_disk_that_fills_up(tmp_path, unbroken, size, stage):
    text = in_namespace(tmp_path / "disk", size, "--blind", "--then")
    first, second = text.split("exit code")[1:3]
    assert first.split()[0] == "2" and second.split()[0] == "0"
    assert "error: the disk is full (" in text and "run the same command again" in text
    assert "left over: nothing" in text
    assert "[tokens] 320 samples" in text.split("error:")[0]  # it was not before extraction
    assert ("[train] resuming behind step" in text) == (stage == "export")
    assert weights_hash(tmp_path / "disk_run") == weights_hash(unbroken)
