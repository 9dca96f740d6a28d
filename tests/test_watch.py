"""Who is named when a job makes no progress; whole jobs are signalled and hung in distributed/test_faults.py."""

import subprocess
import sys
import threading
import time

import psutil
import pytest

from cluster_ds.watch import LOADING, Watch, is_orphan


class Store:
    """What the watch uses of a store, in one process."""

    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def add(self, key, number):
        with self.lock:
            self.values[key] = str(int(self.values.get(key, 0)) + number).encode()
            return int(self.values[key])

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


@pytest.fixture
def job(monkeypatch, capsys):
    """Makes ranks from (place, ticks, seconds without progress); lets one ask; gives who left and what was said."""
    monkeypatch.setattr("cluster_ds.watch._ANSWER_S", 0.05)
    monkeypatch.setattr("cluster_ds.watch._PATIENCE_S", 1.0)

    def run(*places, asking, answering=None):
        store, left, watches = Store(), [], []
        for rank, (where, ticks, silent_s) in enumerate(places):
            watch = Watch(rank, len(places), lambda: store)
            watch._where, watch._ticks, watch._since = where, ticks, time.monotonic() - silent_s
            watch._deferred, watch._hang_timeout_s = True, 10.0
            monkeypatch.setattr(watch, "_leave", lambda code, message, rank=rank: left.append(rank))
            watches.append(watch)
            if answering is None or rank in answering:
                threading.Thread(target=watch._answer, daemon=True).start()
        watches[asking]._ask_around(places[asking][2])
        return left, capsys.readouterr().err

    return run


def test_a_rank_that_hangs_in_loading_names_itself_while_others_still_work(job):
    left, said = job((f"step 1, {LOADING}", 9, 11), ("step 1, micro-batch 2, forward", 5, 1), asking=0)
    assert left == [0] and "rank 0 hangs in step 1, loading a micro-batch; rank 1 is in step 1" in said
    assert "[rank 0] in step 1, loading a micro-batch, its stack:" in said


def test_the_one_that_is_behind_is_named_by_the_one_that_waits(job):
    left, said = job(("step 4, micro-batch 1, backward", 30, 11), (f"step 4, {LOADING}", 28, 10.5), asking=0)
    assert left == [0] and "rank 1 hangs in step 4, loading a micro-batch; rank 0 is in step 4, micro-batch 1, backward" in said
    assert "[rank 1] in step 4, loading a micro-batch, its stack:" in said  # from its own answer


def test_waiting_for_a_rank_that_works_is_no_hang(job):
    left, said = job(("step 4, micro-batch 1, backward", 30, 11), ("step 4, micro-batch 1, forward", 28, 2), asking=0)
    assert left == [] and said == ""


def test_a_rank_that_does_not_answer(job):
    left, said = job(("step 4, micro-batch 1, backward", 30, 11), ("", 0, 0), asking=0, answering=[0])
    assert left == [0] and "rank 1 does not answer; rank 0 is in step 4" in said


def test_all_wait_for_each_other(job):
    left, said = job(("step 4, micro-batch 1, update", 30, 11), ("step 4, micro-batch 1, update", 30, 11), asking=1)
    assert left == [1] and "all ranks wait for each other" in said


def test_the_grace_after_the_launcher_has_gone_waits_for_a_save(monkeypatch):
    watch, left = Watch(), []
    monkeypatch.setattr(watch, "_leave", lambda code, message: left.append(message))
    monkeypatch.setattr("cluster_ds.watch._is_alive", lambda process: False)
    monkeypatch.setattr("cluster_ds.watch._GRACE_S", 0.1)
    monkeypatch.setattr(watch, "_siblings_gone", lambda: False)
    watch._starters, watch._deferred = [None], True
    with watch.unhurried():
        for _ in range(3):
            watch._look_at_launcher()
            time.sleep(0.1)
    assert watch.requested == "the end of the deepspeed launcher" and left == []
    time.sleep(0.2)
    watch._look_at_launcher()
    assert left == ["no progress since the launcher has gone: leaving without a checkpoint"]


def test_who_has_lost_its_parent_is_an_orphan_and_the_head_of_a_session_is_not():
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, start_new_session=True)
    orphan = psutil.Process(int(parent.stdout.readline()))
    try:
        assert not is_orphan(orphan.pid) and not is_orphan(parent.pid)
        parent.kill()
        parent.wait()
        assert is_orphan(orphan.pid)
    finally:
        orphan.kill()


def test_a_rank_whose_launcher_was_killed_before_it_looked_stops(monkeypatch):
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setattr("cluster_ds.watch.is_orphan", lambda pid: True)
    watch, left = Watch(), []
    monkeypatch.setattr(watch, "_leave", lambda code, message: left.append(message))
    monkeypatch.setattr(watch, "_siblings_gone", lambda: False)
    watch._look_at_launcher()
    assert left == ["stopped by the end of the deepspeed launcher: the same command continues from what is finished"]
