import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster_ds import embedded
from cluster_ds.embedded import DATA_SETS, SMOLLM2, resolve_data, resolve_model
from cluster_ds.files import commit_folder, exclusive
from cluster_ds.source_tasks import SHARES, make_tasks


@pytest.fixture(scope="module")
def rows():
    return {
        part: [json.loads(line) for line in open(resolve_data(f"embedded:python_source_small{suffix}"), encoding="utf-8")]
        for part, suffix in (("train", ""), ("held_out", "/held_out"))
    }


def test_training_and_held_out_share_no_module(rows):
    train, held_out = ({row["module"] for row in rows[part]} for part in ("train", "held_out"))
    assert len(train) > 50 and len(held_out) > 5 and not train & held_out


def test_several_kinds_with_a_long_tail(rows):
    counts = Counter(row["kind"] for row in rows["train"])
    assert set(counts) == set(SHARES) and counts["write"] > 10 * counts["methods"]
    longest = DATA_SETS["python_source_small"][2]
    assert all(0 < len(row["instruction"]) + len(row["response"]) <= longest for row in rows["train"])
    assert len({row["instruction"] for row in rows["train"]}) == len(rows["train"])


def test_the_text_is_real(rows):
    """Functions that were asked for are Python, by the parser's word."""
    import ast

    written = [row["response"] for row in rows["train"] if row["kind"] == "write"]
    for code in written:
        ast.parse(code)
    parameters = [json.loads(row["response"]) for row in rows["train"] if row["kind"] == "parameters"]
    assert all(p["name"] for one in parameters for p in one)


def test_made_twice_is_made_alike(rows):
    num_train, num_held_out, max_chars = DATA_SETS["python_source_small"]
    assert make_tasks({"train": num_train, "held_out": num_held_out}, max_chars) == rows


def test_held_out_rows_by_kind(rows):
    """Five times as many, the former among them, from the same modules as no training row."""
    modules, instructions, count = {row["module"] for row in rows["train"]}, set(), 0
    for kind in SHARES:
        path = resolve_data(f"embedded:python_source_small/held_out/{kind}")
        of_kind = [json.loads(line) for line in open(path, encoding="utf-8")]
        assert of_kind and all(row["kind"] == kind and row["module"] not in modules for row in of_kind)
        instructions |= {row["instruction"] for row in of_kind}
        count += len(of_kind)
    assert 4.5 * DATA_SETS["python_source_small"][1] < count <= 5 * DATA_SETS["python_source_small"][1]
    assert {row["instruction"] for row in rows["held_out"]} <= instructions


def test_unknown_names():
    with pytest.raises(ValueError, match="no embedded data set 'embedded:nothing': embedded:python_source"):
        resolve_data("embedded:nothing")
    with pytest.raises(ValueError, match="KIND is one of write, complete"):
        resolve_data("embedded:python_source/held_out/poem")
    with pytest.raises(ValueError, match="no embedded model 'embedded:nothing': embedded:smollm2"):
        resolve_model("embedded:nothing")
    assert resolve_data("some/data") == "some/data"


def test_a_second_job_waits_for_the_firsts_model(tmp_path, monkeypatch, capsys):
    made, told = [], ""
    monkeypatch.setenv("CLUSTER_DS_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_smollm2_source", lambda: tmp_path)
    monkeypatch.setattr(embedded, "_make_smollm2", made.append)
    models = tmp_path / "models"
    models.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with exclusive(models, ""):
            second = pool.submit(resolve_model, f"embedded:{SMOLLM2}")
            deadline = time.monotonic() + 30
            while "waiting for it" not in told and time.monotonic() < deadline:
                told += capsys.readouterr().out
                time.sleep(0.01)
            with commit_folder(models / SMOLLM2, {}):
                pass
        assert second.result(30) == str(models / SMOLLM2)
    assert "waiting for it" in told and made == []
