"""Tables and libraries' messages, on a terminal and in a job's log."""

import os
import subprocess
import sys

import pytest

from cluster_ds.messages import Progress, bars_on_terminals_only, show_table, unless_it_fails

from .conftest import ROOT


def test_a_table_in_a_log(capsys):
    show_table("scores", [("humaneval", "0.250", "41"), ("pass", "12.5", "")], ("score", "value", "right"))
    assert capsys.readouterr().out == (
        "scores\n  score      value  right\n  humaneval  0.250     41\n  pass        12.5\n"
    )
    show_table("facts", [("kept", "3 of 4"), ("a longer name", "7")])
    assert capsys.readouterr().out == "facts\n  kept           3 of 4\n  a longer name  7\n"


def test_a_table_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_table("facts", [("kept", "3 of 4")])
    assert "│ kept │ 3 of 4 │" in capsys.readouterr().out
    show_table("of [/runs]", [("data/part-[ab].jsonl", "[/y]z")])  # no markup of rich's
    printed = capsys.readouterr().out
    assert "│ data/part-[ab].jsonl │ [/y]z │" in printed and "of [/runs]" in printed


def test_progress_in_a_log_is_ten_lines(capsys):
    progress = Progress("score", 164, "samples")
    for _ in range(164):
        progress.add(1)
    progress.print("done")
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert len(lines) == 11 and lines[0].startswith("[score] 17 of 164 samples, about ") and lines[-1] == "done"
    assert lines[9].startswith("[score] 164 of 164 samples, about 0 s left") and printed.err == ""
    Progress("score", 0, "samples").close()
    assert capsys.readouterr() == ("", "")


def test_what_fails_is_not_held_back(capsys):
    with unless_it_fails():
        print("built")
    assert capsys.readouterr().out == ""
    with pytest.raises(OSError), unless_it_fails():
        print("building")
        raise OSError
    assert capsys.readouterr().out == "building\n"


@pytest.mark.parametrize(("rank", "said"), [(0, ["of this run", "of a library"]), (1, [])])
def test_warnings_are_said_once(rank, said):
    program = f"""
import logging, sys, warnings
sys.path.insert(0, {str(ROOT)!r})
from cluster_ds.messages import quiet_libraries
quiet_libraries({rank})
for _ in range(3):
    warnings.warn("of this run")
    warnings.warn("of the future", FutureWarning)
logging.getLogger("transformers").warning("of a library")
logging.getLogger("torch.utils.cpp_extension").warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [text for text in ("of this run", "of the future", "of a library") if text in done.stderr] == said
    assert done.stderr.count("UserWarning: of this run") == (rank == 0)
    assert "CUDA" not in done.stderr


def test_deepspeed_does_not_say_that_there_is_no_gpu():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment.pop("DS_ACCELERATOR", None)
    for first, said in (("import cluster_ds", False), ("", True)):
        program = f"{first}\nimport deepspeed"
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        assert ("Setting accelerator to CPU" in done.stdout) == said


def test_a_bar_does_not_reach_a_log(capsys, monkeypatch):
    from tqdm import tqdm

    with bars_on_terminals_only():
        list(tqdm(range(3)))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with bars_on_terminals_only():
        list(tqdm(range(3)))
    assert "3/3" in capsys.readouterr().err
