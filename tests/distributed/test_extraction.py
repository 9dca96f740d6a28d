"""Extraction over ranks: the same bits for any number, and after any kills, finished shards untouched."""

import json
import random
import shutil
import time

import pytest

from .jobs import finish, kill_rank_when, start_job, wait_until

pytestmark = pytest.mark.distributed
JOB = ("--set", "selection.tokens_per_batch=1024")


def shards(output):
    """Name -> (content, time of writing) of the finished shards of a run's own cache."""
    finished = sorted((output.parent / "cache" / "proxies").glob("*/shard-*.json"))
    return {p.stem: (p.with_suffix(".safetensors").read_bytes(), p.stat().st_mtime_ns) for p in finished}


def num_shards(output):
    return len(list((output.parent / "cache" / "proxies").glob("*/shard-*.json")))


def plan_hash(output):
    return json.loads((output / "plan" / "manifest.json").read_text())["plan_hash"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    output = tmp_path_factory.mktemp("one") / "run"
    finish(start_job(output, *JOB, script="preprocess.py", num_ranks=1), output)
    return output


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_proxies_and_plan_do_not_depend_on_the_number_of_ranks(alone, tmp_path, num_ranks):
    output = tmp_path / "run"
    text = finish(start_job(output, *JOB, script="preprocess.py", num_ranks=num_ranks), output)
    assert "padding; 32 of 32 shards to do" in text
    one, several = shards(alone), shards(output)
    assert len(one) == 32 and {name: content for name, (content, _) in one.items()} == {
        name: content for name, (content, _) in several.items()
    }
    assert plan_hash(output) == plan_hash(alone)


@pytest.mark.slow
def test_killed_five_times_no_finished_shard_is_made_again(alone, tmp_path):
    """All ranks at once, at random moments: one that is left would finish the others' shards before its launcher ends it."""
    output = tmp_path / "run"
    rng = random.Random(7)
    done: dict = {}
    for _ in range(5):
        job, goal = start_job(output, *JOB, script="preprocess.py"), len(done) + rng.randint(1, 3)
        wait_until(job, lambda goal=goal: num_shards(output) >= goal)
        moment = time.monotonic() + rng.uniform(0, 0.04)
        kill_rank_when(job, None, lambda moment=moment: time.monotonic() > moment)
        now = shards(output)
        assert len(now) > len(done) and all(now[name] == value for name, value in done.items())
        done = now
    assert len(done) < 32
    text = finish(start_job(output, *JOB, script="preprocess.py"), output)
    last = shards(output)
    assert all(last[name] == value for name, value in done.items()) and f"({len(done)} finished shards reused" in text
    assert {n: c for n, (c, _) in last.items()} == {n: c for n, (c, _) in shards(alone).items()}
    assert plan_hash(output) == plan_hash(alone)


def test_fewer_shards_than_ranks(alone, tmp_path):
    """One shard is missing: one rank makes it, the others must not wait for ever."""
    output = tmp_path / "run"
    shutil.copytree(alone.parent / "cache", tmp_path / "cache")
    lost = sorted((tmp_path / "cache" / "proxies").glob("*/shard-00007.*"))
    assert len(lost) == 2
    for path in lost:
        path.unlink()
    text = finish(start_job(output, *JOB, script="preprocess.py", num_ranks=4), output)
    assert "1 of 32 shards to do" in text and "(31 finished shards reused" in text
    assert {n: c for n, (c, _) in shards(output).items()} == {n: c for n, (c, _) in shards(alone).items()}
    assert plan_hash(output) == plan_hash(alone)
