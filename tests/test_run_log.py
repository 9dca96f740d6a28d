"""What a run writes down: spikes with their samples, monitors, and a held-out loss that decides."""

import json

import numpy as np
import pytest

from cluster_ds.checkpoint import Keep
from cluster_ds.diagnosis import Diagnosis
from cluster_ds.engine import StepRecord
from cluster_ds.monitor import monitor_config, require_monitors
from cluster_ds.recipe_file import load_recipe
from cluster_ds.run_log import RunLog, read_lines
from cluster_ds.schedule import Schedule
from cluster_ds.validation import Progress, read_progress

from .conftest import hand_plan


def record_of(loss, rows, losses):
    zeros = {f: 0 for f in StepRecord.__dataclass_fields__}
    lists = {"cluster_loss": [loss, float("nan")], "cluster_samples": [4, 0], "rank_seconds": [1.0], "rows": rows, "losses": losses}
    return StepRecord(**{**zeros, **lists, "loss": loss, "num_tokens": 32, "num_supervised_tokens": 20})


class Monitor:
    def __init__(self):
        self.events = []

    def write_events(self, events):
        self.events += events


def write_steps(log, first, losses):
    for i, loss in enumerate(losses):
        log.write(first + i, record_of(loss, [0, 5, 9, 3], [loss, 0.1, 9 * loss, 0.2]), 1e-3, 1.0, 2.0, 0.0)


def test_a_spike_is_written_with_its_worst_samples_and_not_twice_after_a_resume(tmp_path):
    schedule = Schedule(hand_plan([0, 1] * 20), global_batch_size=4, epochs=10)
    usual = (2.0 + 0.01 * np.sin(np.arange(20))).tolist()
    log = RunLog(tmp_path, 0, schedule)
    write_steps(log, 0, [5.0, *usual[:15], 2.2, 3.0])  # the first is far off, but nothing came before it
    log.close()
    spikes = read_lines(tmp_path / "spikes.jsonl")
    assert [s["step"] for s in spikes] == [18]
    assert spikes[0]["usual"] == pytest.approx(2.0, abs=0.02) and spikes[0]["deviation"] == pytest.approx(0.04, abs=0.001)
    assert spikes[0]["samples"][:2] == [{"id": "s0009", "loss": 27.0, "cluster": 1}, {"id": "s0000", "loss": 3.0, "cluster": 0}]
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 19, "lo')  # killed here
    log = RunLog(tmp_path, 16, schedule)
    assert len(log.recent) == 16
    write_steps(log, 16, [2.2, 3.0, float("nan"), 2.0, 2.0])  # one that is not finite does not make the next ones suspect
    log.close()
    spikes = read_lines(tmp_path / "spikes.jsonl")
    assert [s["step"] for s in spikes] == [18, 19]
    assert {s["id"] for s in spikes[1]["samples"][:2]} == {"s0000", "s0009"}  # whose losses are not finite
    assert [e["step"] for e in read_lines(tmp_path / "log.jsonl")] == list(range(1, 22))
    assert len(RunLog(tmp_path, 21, schedule).recent) == 20


def test_rates_and_what_a_monitor_is_told(tmp_path):
    schedule = Schedule(hand_plan([0, 1] * 20), global_batch_size=4)
    monitor = Monitor()
    log = RunLog(tmp_path, 0, schedule, world_size=2, flops=lambda lengths, n: 10.0 * lengths.sum() + n, peak=100.0, monitor=monitor)
    seen = Diagnosis([[1.0, 0.5], [0.5, 1.0]], 0.3, 4, 0.0, 0.1)
    log.write(0, record_of(2.0, [0, 5, 9, 3], [2.0] * 4), 1e-3, 1.0, 2.0, 0.25, seen)
    log.write_held_out(1, {"sample_mean": 3.0, "token_mean": 2.5, "num_samples": 9}, 0.5, 1, "rows")
    log.close()
    entry = json.loads((tmp_path / "log.jsonl").read_text())
    assert entry["tokens_per_s"] == 16 and entry["tokens_per_s_per_rank"] == 8 and entry["seconds"] == 2.0
    assert entry["model_flops"] == 340 and entry["mfu"] == pytest.approx(340 / 2.0 / 2 / 100)  # 4 x 8 tokens, 20 supervised
    assert entry["rank_cosine"] == 0.5 and entry["gradient_diversity"] == 0.3 and entry["diagnosis_s"] == 0.1
    told = {name: (value, step) for name, value, step in monitor.events}
    assert told["cluster_ds/loss"] == (2.0, 1) and told["cluster_ds/cluster_loss/0"] == (2.0, 1)
    assert told["cluster_ds/held_out_sample_mean"] == (3.0, 1) and told["cluster_ds/rank_cosine"] == (0.5, 1)
    assert read_lines(tmp_path / "held_out.jsonl")[0]["step"] == 1


@pytest.mark.parametrize(
    ("losses", "best", "exhausted"),
    [
        ([], None, False), ([3.0], 2, False), ([3.0, 2.0, 2.0, 2.5], 4, True), ([3.0, 2.0, 2.5, 1.9], 8, False),
        ([float("nan"), float("nan")], None, False), ([3.0, 3.0, 3.0], 2, True),
    ],
)
def test_patience_by_hand(losses, best, exhausted):
    progress = Progress(2, [(2 * i + 2, loss) for i, loss in enumerate(losses)])
    assert progress.best_step == best and progress.is_exhausted == exhausted
    assert not Progress(None, progress.losses).is_exhausted


def test_the_best_step_that_has_a_checkpoint(tmp_path):
    """Held-out losses of other rows are not compared; steps whose checkpoint did not fit are not exported."""
    entries = [(10, 3.0, "rows"), (20, 2.0, "rows"), (30, 2.5, "rows"), (40, 1.0, "other rows"), (50, 1.5, "rows")]
    lines = [json.dumps({"step": step, "sample_mean": loss, "data": data}) for step, loss, data in entries]
    (tmp_path / "held_out.jsonl").write_text("\n".join(lines))
    for step in (10, 30):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text('{"files": {}}')
    progress = read_progress(tmp_path, 45, 1, "rows")
    assert progress.losses == [(10, 3.0), (20, 2.0), (30, 2.5)]  # 50 is ahead of where the run goes on
    assert progress.best_step == 20 and progress.best_kept == 30 and progress.is_exhausted
    assert read_progress(tmp_path, 45, 1, "other rows").losses == [(40, 1.0)]


def test_which_checkpoints_stay():
    whole = [10, 20, 30, 40, 50, 60]
    assert Keep(2).steps(whole) == {50, 60}
    assert Keep(1, milestone_every=30).steps(whole) == {30, 60}
    assert Keep(1, best=20).steps(whole) == {20, 60}
    assert Keep(2, milestone_every=20, best=99).steps(whole) == {20, 40, 50, 60}


def test_monitors_that_are_not_installed_or_named_twice(tmp_path, monkeypatch):
    recipe = load_recipe("tiny", ["train.log_to=[tensorboard, csv]"])
    sections = monitor_config(recipe, tmp_path, 5, {})
    assert sections["tensorboard"]["job_name"] == "tiny-from-5" and sections["csv_monitor"]["enabled"]
    with pytest.raises(ValueError, match="cpu has tensorboard, and train.log_to names tensorboard as well"):
        monitor_config(recipe, tmp_path, 0, {"tensorboard": {"enabled": True}})
    monkeypatch.setattr("cluster_ds.monitor.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="train.log_to names tensorboard: pip install tensorboard"):
        require_monitors(recipe)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["evaluate.patience=2"], "need evaluate.every"),
        (["evaluate.every=3", "evaluate.held_out=null"], "evaluate.every 3 without evaluate.held_out"),
        (["evaluate.every=3", "evaluate.keep_best=true"], "evaluate.every 3 is no multiple of train.checkpoint_every 5"),
        (["train.milestone_every=7"], "milestone_every 7 is no multiple of checkpoint_every 5"),
        (["train.log_to=[tensorbord]"], "train.log_to"),
    ],
)
def test_settings_that_contradict(settings, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("tiny", settings)
