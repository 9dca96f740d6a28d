"""kill -9 in the middle of a step and of a save; the same command then ends with the unbroken run's very bits."""

import json

import pytest

from .jobs import ROOT, finish, kill_rank_when, log_of, start_job, steps_done, weights_hash

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    output = finish(start_job(folder), folder)
    assert "no checkpoint, starting at step 0" in output
    return folder


def assert_ended_alike(broken, unbroken):
    assert weights_hash(broken) == weights_hash(unbroken)
    keys = ("step", "loss", "lr", "grad_norm", "weight_sum", "num_samples")
    assert log_of(broken, *keys) == log_of(unbroken, *keys)  # every step once, same values
    assert (broken / "census.jsonl").read_text() == (unbroken / "census.jsonl").read_text()


@pytest.mark.slow  # tests/faults.sh kills in steps as well
def test_killed_in_a_step(unbroken):
    broken = unbroken.parent / "killed_in_step"
    kill_rank_when(start_job(broken), 1, lambda: steps_done(broken) >= 7)  # a checkpoint is at 5
    output = finish(start_job(broken), broken)
    assert "[train] resuming behind step 5" in output and "[plan] reused" in output
    assert_ended_alike(broken, unbroken)


@pytest.mark.slow
def test_another_micro_batch_size_on_resume(unbroken):
    """The global batches and learning rates are a function of plan, seed and step alone."""
    broken = unbroken.parent / "other_micro_batch"
    kill_rank_when(start_job(broken), 0, lambda: steps_done(broken) >= 6)
    output = finish(start_job(broken, "--set", "train.micro_batch_size=2"), broken)
    assert "[train] until then 2 ranks x 4 samples x 2 micro-batches = 16 a step; now 2 ranks x 2 samples x 4" in output
    assert (broken / "census.jsonl").read_text() == (unbroken / "census.jsonl").read_text()
    assert log_of(broken, "step", "lr") == log_of(unbroken, "step", "lr")


@pytest.mark.slow
def test_killed_in_a_save(unbroken):
    broken = unbroken.parent / "killed_in_save"
    target = broken / "checkpoints" / "step-00000005"
    kill_rank_when(start_job(broken), 0, target.is_dir)
    assert not (target / "manifest.json").exists()  # it was in the middle
    output = finish(start_job(broken), broken)
    assert "checkpoint step-00000005 passed over: its saving was interrupted" in output
    assert "no checkpoint, starting at step 0" in output
    assert_ended_alike(broken, unbroken)


def test_a_finished_run_is_reused(unbroken):
    before = weights_hash(unbroken)
    output = finish(start_job(unbroken), unbroken).split("[run] ")[-1]
    assert "[plan] reused" in output and "[train] reused the finished model" in output and "(cached)" in output
    assert "step 1/" not in output and weights_hash(unbroken) == before


def test_a_changed_setting_is_refused_by_name(unbroken):
    job = start_job(unbroken, "--set", "train.lr=2e-3")
    assert job.wait(200) != 0
    text = unbroken.with_suffix(".out").read_text().split("[run] ")[-1]
    assert "belongs to another run" in text and "lr: then 0.001, now 0.002" in text and "Traceback" not in text


def test_preprocessing_alone_makes_the_same_proxies_and_plan(unbroken):
    """One process under python, two ranks under deepspeed: the same bits."""
    import json
    import subprocess
    import sys

    alone = unbroken.parent / "alone" / "run"
    alone.parent.mkdir()
    command = [sys.executable, str(ROOT / "launch" / "preprocess.py"), "--recipe", "tiny", "--output_dir", str(alone)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    hashes = [json.loads((f / "plan" / "manifest.json").read_text())["plan_hash"] for f in (alone, unbroken)]
    assert hashes[0] == hashes[1]
    shards = [
        {p.name: p.read_bytes() for p in (f.parent / "cache" / "proxies").rglob("*.safetensors")} for f in (alone, unbroken)
    ]
    assert shards[0] == shards[1] and len(shards[0]) > 10


def test_a_plan_with_permuted_labels_trains_differently(unbroken):
    """The plan decides what is trained: the same samples under other clusters and weights give another model."""
    from dataclasses import replace

    import numpy as np

    from cluster_ds.plan import Plan

    other = unbroken.parent / "permuted"
    plan = Plan.read(unbroken / "plan")
    order = np.random.default_rng(0).permutation(len(plan))
    permuted = {c: getattr(plan, c)[order] for c in ("cluster", "stratum", "weight", "kept")}
    plan = replace(plan, **permuted)
    plan.write(other / "plan")
    finish(start_job(other), other)
    assert weights_hash(other) != weights_hash(unbroken)


@pytest.mark.slow
def test_killed_in_the_second_epoch_of_a_run_that_draws_anew(tmp_path):
    job = ("--set", "selection.choice=random", "--set", "selection.redraw=epoch")
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    text = finish(start_job(unbroken, *job), unbroken)
    steps = [json.loads(line)["rows"] for line in (unbroken / "census.jsonl").read_text().splitlines()]
    rows = [{row for step in epoch for row in step} for epoch in (steps[:5], steps[5:])]
    assert len(rows[0]) == len(rows[1]) and rows[0] != rows[1]  # each sample once an epoch, others in the second
    assert "epoch 2: each of 72 kept samples once" in text and "drawn anew each epoch from 320" in text
    kill_rank_when(start_job(broken, *job), 1, lambda: steps_done(broken) >= 7)
    assert "[train] resuming behind step 5" in finish(start_job(broken, *job), broken)
    assert_ended_alike(broken, unbroken)
