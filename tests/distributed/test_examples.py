"""The examples run as their README says, and do what they claim."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .jobs import ROOT, TIMEOUT_S
from .ranks import free_port

pytestmark = pytest.mark.distributed


def run(name):
    command = [
        str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port()),
        str(ROOT / "examples" / name),
    ]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text, what):
    return [float(loss) for loss in re.findall(rf"step \d+: loss ([\d.]+) {what}", text)]


@pytest.mark.slow
def test_an_existing_loop():
    assert len(losses(run("plain_loop.py"), "on this rank's")) == 320 // 16


@pytest.mark.slow
def test_what_becomes_of_an_existing_loop():
    text = run("cluster_loop.py")
    samples, kept = re.search(r"(\d+) samples in 4 clusters.*?kept (\d+)", text, re.DOTALL).groups()
    after = losses(text, "over the global batch")
    assert int(samples) == 320 and len(after) == -(-int(kept) // 16) and after[-1] < after[0]


def test_a_model_that_is_no_language_model():
    text = run("not_a_language_model.py")
    right = float(re.search(r"([\d.]+)% of 397 held-out digits are right", text).group(1))
    assert right > 50  # ten digits: guessing gives 10
