"""What the launchers say that no other test looks at: the dry run, the preview, memory, waiting for another job."""

import re
import time
from functools import partial

from cluster_ds.distributed import Ranks
from cluster_ds.files import exclusive
from cluster_ds.memory import peak_memory
from tests.forked import ROOT, finish, start

ROWS = str(ROOT / "tests" / "cases" / "inputs" / "s02_21rows.jsonl")


def run(tmp_path, script, *arguments):
    recipe = ["--recipe", "tiny", "--output_dir", str(tmp_path / "run")]
    return start(script, partial(list, [*recipe, *arguments]), tmp_path, tmp_path / "printed")


def printed(tmp_path):
    return (tmp_path / "printed").read_text()


def test_a_dry_run_touches_nothing(tmp_path):
    arguments = ("--dry_run", "--ranks", "4", "--set", "deepspeed.config=zero2", "--set", f"data.path={tmp_path / 'no.jsonl'}")
    assert finish(run(tmp_path, "train.py", *arguments)) == 0
    text = printed(tmp_path)
    assert "4 ranks x 4 samples x 1 micro-batches = 16 a step, 2 epochs; zero2, bf16, adamw" in text
    assert "missing  data (data)" in text and "[dry run] 1 of 5 items are missing" in text
    assert not (tmp_path / "run").exists()
    assert finish(run(tmp_path, "train.py", "--dry_run", "--ranks", "3")) == 2
    assert "global_batch_size 16 is not a multiple of micro_batch_size 4 x 3 ranks = 12" in printed(tmp_path)


def test_a_preview_stops_before_the_model(tmp_path):
    arguments = ("--preview", "2", "--set", f"data.path={ROWS}", "--set", "data.template=plain")
    assert finish(run(tmp_path, "preprocess.py", *arguments)) == 0
    text = printed(tmp_path)
    assert "<bos>Count to 1.\n«1<eos>»" in text and "<bos>Count to 21.\n«1 2 3" in text
    assert "[proxies]" not in text and not (tmp_path / "run" / "plan").exists()


def test_the_same_proxies_are_waited_for(tmp_path):
    settings = (f"data.path={ROWS}", "data.template=plain", "train.global_batch_size=8")
    words = [word for setting in settings for word in ("--set", setting)]
    assert finish(run(tmp_path, "preprocess.py", *words)) == 0
    (proxies,) = (tmp_path / "cache" / "proxies").iterdir()
    with exclusive(proxies, "nobody else is here"):
        again = run(tmp_path, "preprocess.py", *words, "--output_dir", str(tmp_path / "other"))
        deadline = time.monotonic() + 60
        while f"[proxies] another job builds {proxies}: waiting for it" not in printed(tmp_path):
            assert time.monotonic() < deadline and again.is_alive()
            time.sleep(0.05)
    assert finish(again) == 0 and re.search(r"\([1-9]\d* finished shards reused", printed(tmp_path))


def test_peaks_are_of_their_stage(capsys):
    ranks = Ranks(0, 1, 0)
    with peak_memory("small", ranks):
        pass
    with peak_memory("large", ranks):
        block = bytearray(300 * 10**6)
        block[:: 4096] = bytes(len(block[:: 4096]))
        del block
    with peak_memory("after", ranks):
        pass
    small, large, after = (
        float(size) * {"MB": 1, "GB": 1000}[unit] for size, unit in re.findall(r"host ([\d.]+) (MB|GB) a rank", capsys.readouterr().out)
    )
    assert large - small > 250 and large - after > 250
