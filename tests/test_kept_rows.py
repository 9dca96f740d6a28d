"""Exports read back by the readers of other trainers: row counts, columns and weights are the plan's and the data's."""

import json
import subprocess
import sys
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from cluster_ds.kept_rows import (
    TARGETS,
    kept_rows,
    weights_note,
    write_indices,
    write_jsonl,
    write_llamafactory,
    write_parquet,
)
from cluster_ds.recipe_file import load_recipe
from cluster_ds.records import read_records

from .conftest import ROOT, hand_plan

RECIPE = """\
name: made
model: {{name_or_path: embedded:tiny}}
data:
  {sources}
  template: plain
  max_length: 64
train: {{epochs: 1, global_batch_size: 2, micro_batch_size: 1, lr: 1e-3}}
deepspeed: {{config: cpu}}
"""
ROWS = [
    {"instruction": f"add {i}", "output": f"is {i}", "level": i, "score": 3.5 * i, "tags": [{"n": 1.25}], "note": None}
    for i in range(8)
]


def plan_of(folder, sources: str, keep):
    """A recipe over files in `folder` and a plan of its samples in two clusters of unequal weights; `keep`: their numbers."""
    (folder / "recipe.yaml").write_text(RECIPE.format(sources=sources))
    recipe = load_recipe(str(folder / "recipe.yaml"))
    from cluster_ds.prepare import train_sources

    records, _ = read_records(train_sources(recipe))
    n = len(records)
    clusters = (np.arange(n) * 3 < n).astype(int)
    plan = hand_plan(clusters, ids=[r.id for r in records], kept=np.isin(np.arange(n), keep))
    plan.distance[:] = np.arange(n) / 10
    return recipe, plan


@pytest.fixture
def single(tmp_path):
    lines = [json.dumps(row) for row in ROWS]
    lines.insert(2, json.dumps({"instruction": "", "output": "", "level": 99, "score": 0.0, "tags": [], "note": None}))  # excluded
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    return *plan_of(tmp_path, f"path: {tmp_path}/data.jsonl", [1, 2, 5, 7]), tmp_path


def check(table, plan, kept_numbers):
    assert table["sample_id"][:] == [plan.ids[i] for i in kept_numbers]
    for name, values in (("weight", plan.weight), ("cluster", plan.cluster), ("distance", plan.distance)):
        assert table[name][:] == values[kept_numbers].tolist()


def test_jsonl_and_parquet(single):
    recipe, plan, folder = single
    kept = kept_rows(recipe, plan)
    for write, kind in ((write_jsonl, "json"), (write_parquet, "parquet")):
        (path,) = write(kept, folder / f"out.{kind}")
        table = load_dataset(kind, data_files=str(path), cache_dir=str(folder / "cache"))["train"]
        check(table, plan, [1, 2, 5, 7])
        for name in ("instruction", "output", "level", "score"):
            assert table[name][:] == [ROWS[i][name] for i in (1, 2, 5, 7)]
        assert isinstance(table["level"][0], int) and isinstance(table["score"][0], float)
    first = json.loads((folder / "out.json").read_text().splitlines()[0])
    assert first == {**ROWS[1], "sample_id": plan.ids[1], "cluster": int(plan.cluster[1]), "weight": plan.weight[1], "distance": 0.1}


def test_indices_select_the_same_rows_of_the_source(single):
    recipe, plan, folder = single
    (path,) = write_indices(kept_rows(recipe, plan), folder / "indices.json")
    found = json.loads(path.read_text())["data"]
    assert (found["files"], found["split"], found["subset"]) == (["data.jsonl"], "train", None)
    assert found["indices"] == [1, 3, 6, 8]  # the row that is excluded counts
    chosen = load_dataset("json", data_files=found["path"], cache_dir=str(folder / "cache"))["train"].select(found["indices"])
    assert chosen["instruction"][:] == [ROWS[i]["instruction"] for i in (1, 2, 5, 7)]
    check(found, plan, [1, 2, 5, 7])


def test_several_sources_of_several_formats(tmp_path):
    when = [datetime(2026, 1, 2, 3, 4, 5), None, datetime(2026, 5, 6)]
    pq.write_table(
        pa.table({
            "problem": ["p0", "p1", "p2"], "solution": ["s0", "s1", "s2"], "lang": ["python"] * 3, "when": when,
            "score": pa.array([0.1, 2.5, None], pa.float32()), "vector": [[0.5, 1.0]] * 3,
        }), tmp_path / "code.parquet",
    )  # fmt: skip
    (tmp_path / "rest.csv").write_text('instruction,output,weight\nq0,"a\n0",007\nq1,a1,3.10\n')
    sources = f"sources: {{code: {{path: {tmp_path}/code.parquet}}, rest: {{path: {tmp_path}/rest.csv}}}}"
    recipe, plan = plan_of(tmp_path, sources, [0, 2, 3, 4])
    kept = kept_rows(recipe, plan)
    assert kept.notes == [
        "columns vector are of a kind that cannot be written as text: left out",
        "the data have columns of the plan's names: the plan's are called cluster_ds_weight and so on",
    ]
    rows = [json.loads(line) for line in write_jsonl(kept, tmp_path / "out.jsonl")[0].read_text().splitlines()]
    assert [row["cluster_ds_source"] for row in rows] == ["code", "code", "rest", "rest"]
    assert rows[0]["score"] == 0.1 and rows[1]["score"] is None and rows[0]["when"].startswith("2026-01-02 03:04:05")
    assert rows[0]["problem"] == "p0" and rows[2]["output"] == "a\n0" and rows[2]["weight"] == "007"  # as they are written
    assert [row["cluster_ds_weight"] for row in rows] == plan.weight[[0, 2, 3, 4]].tolist()
    table = load_dataset("parquet", data_files=str(write_parquet(kept, tmp_path / "out.parquet")[0]), cache_dir=str(tmp_path / "c"))
    assert table["train"]["problem"][:] == ["p0", "p2", None, None]
    found = json.loads(write_indices(kept, tmp_path / "indices.json")[0].read_text())
    assert found["code"]["indices"] == [0, 2] and found["rest"]["indices"] == [0, 1]
    assert found["rest"]["cluster_ds_sample_id"] == [plan.ids[3], plan.ids[4]]


def test_llamafactory(single):
    recipe, plan, folder = single
    (folder / "lf").mkdir()
    (folder / "lf" / "dataset_info.json").write_text('{"theirs": {"file_name": "theirs.json"}}')
    path, listed = write_llamafactory(kept_rows(recipe, plan), folder / "lf")
    info = json.loads(listed.read_text())
    assert info["theirs"] == {"file_name": "theirs.json"} and info["cluster_ds_made"]["file_name"] == path.name
    table = load_dataset("json", data_files=str(path), cache_dir=str(folder / "cache"))["train"]
    columns = info["cluster_ds_made"]["columns"]
    assert table[columns["prompt"]][:] == [ROWS[i]["instruction"] for i in (1, 2, 5, 7)]
    assert table[columns["response"]][:] == [ROWS[i]["output"] for i in (1, 2, 5, 7)]
    check(table, plan, [1, 2, 5, 7])


@pytest.mark.parametrize(("text", "message"), [("{,", "is not valid JSON"), ("[]", "holds no JSON object of data sets")])
def test_what_lies_in_llamafactorys_folder_is_read_first(single, tmp_path, text, message):
    folder = tmp_path / "lf"
    folder.mkdir()
    (folder / "dataset_info.json").write_text(text)
    with pytest.raises(ValueError, match=f"dataset_info.json {message}"):
        write_llamafactory(kept_rows(*single[:2]), folder)
    assert [path.name for path in folder.iterdir()] == ["dataset_info.json"]


def test_chats_for_llamafactory(tmp_path):
    turns = [{"role": "system", "content": "s"}, *({"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b")) * 2)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": turns[: 3 + 2 * (i % 2)]}) + "\n" for i in range(4)))
    recipe, plan = plan_of(tmp_path, f"path: {tmp_path}/data.jsonl", [0, 1])
    path, listed = write_llamafactory(kept_rows(recipe, plan), tmp_path / "lf")
    entry = json.loads(listed.read_text())["cluster_ds_made"]
    assert entry["formatting"] == "sharegpt" and entry["tags"]["user_tag"] == "user"
    table = load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "cache"))["train"]
    assert [[m["content"] for m in row] for row in table["messages"]] == [["s", "a", "b"], ["s", "a", "b", "a", "b"]]


def test_an_input_column_beside_chats(tmp_path):
    turns = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b")) * 2]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(2)))
    (tmp_path / "alpaca.jsonl").write_text(json.dumps({"instruction": "add", "input": "1 and 2", "output": "3"}) + "\n")
    sources = f"sources: {{chats: {{path: {tmp_path}/chats.jsonl}}, alpaca: {{path: {tmp_path}/alpaca.jsonl}}}}"
    recipe, plan = plan_of(tmp_path, sources, [0, 2])
    rows = json.loads(write_llamafactory(kept_rows(recipe, plan), tmp_path / "lf")[0].read_text())
    assert [message["content"] for message in rows[1]["messages"]] == ["add\n\n1 and 2", "3"]


def test_cells_that_json_and_parquet_have_no_place_for(tmp_path):
    (tmp_path / "data.jsonl").write_text(
        '{"instruction": "a", "output": "x", "score": 1e999, "meta": {}, "who": "\\ud800"}\n'
        '{"instruction": "b", "output": "y", "score": 12, "meta": {}, "who": "b"}\n'
        '{"instruction": "c", "output": "z", "score": 1.50, "meta": {}, "who": null}\n'
    )
    recipe, plan = plan_of(tmp_path, f"path: {tmp_path}/data.jsonl", [0, 1, 2])
    kept = kept_rows(recipe, plan)
    rows = [json.loads(line) for line in write_jsonl(kept, tmp_path / "out.jsonl")[0].read_text().splitlines()]
    assert [row["score"] for row in rows] == [None, 12, 1.5] and [row["who"] for row in rows] == ["\ufffd", "b", None]
    with pytest.raises(ValueError, match=r"Parquet cannot hold these columns .*: export --to jsonl"):
        write_parquet(kept, tmp_path / "out.parquet")
    assert not list(tmp_path.glob("out.parquet*"))


def test_cells_of_tables(tmp_path):
    pq.write_table(
        pa.table({
            "instruction": ["a", "b"], "output": ["x", "y"], "score": pa.array([np.inf, 1.5], pa.float32()), "wide": [np.nan, 2.0],
            "seen": [[datetime(2026, 1, 2)], []], "raw": pa.array([b"\xff\xfe", b"ok"], pa.binary()),
        }), tmp_path / "data.parquet",
    )  # fmt: skip
    recipe, plan = plan_of(tmp_path, f"path: {tmp_path}/data.parquet", [0, 1])
    rows = [json.loads(line) for line in write_jsonl(kept_rows(recipe, plan), tmp_path / "out.jsonl")[0].read_text().splitlines()]
    assert rows[0]["score"] is None and rows[1]["score"] == 1.5 and rows[0]["wide"] is None
    assert rows[0]["seen"] == ["2026-01-02 00:00:00"] and rows[0]["raw"] == "\ufffd\ufffd" and rows[1]["raw"] == "ok"


def test_what_becomes_of_the_weights_is_said(single):
    recipe, plan, _ = single
    kept = kept_rows(recipe, plan)
    low, high = plan.weight[[1, 2, 5, 7]].min(), plan.weight[[1, 2, 5, 7]].max()
    assert weights_note(kept, False).startswith("WARNING: the target reads no sample weights, so the method is only half applied")
    assert f"from {low:.3f} to {high:.3f}" in weights_note(kept, True) and "only half" in weights_note(kept, True)
    plan.weight[:] = 1.0
    assert weights_note(kept_rows(recipe, plan), False) is None


def test_what_cannot_be_exported(single):
    recipe, plan, folder = single
    with pytest.raises(ValueError, match=r"column score has no one type .*: export --to jsonl"):
        kept = kept_rows(recipe, plan)
        kept.values[0]["score"] = "high"
        write_parquet(kept, folder / "out.parquet")
    assert not list(folder.glob("out.parquet*"))
    lines = (folder / "data.jsonl").read_text().splitlines()
    (folder / "data.jsonl").write_text("\n".join(lines[:6]))
    with pytest.raises(ValueError, match="2 of 4 kept samples are not in the data any more: give the recipe and the files"):
        kept_rows(recipe, plan)


def test_the_command(single):
    recipe, plan, folder = single
    plan.manifest.update(sizes=[1], counts=[1], weights=[1.0])
    plan.write(folder / "run" / "plan")
    command = [sys.executable, ROOT / "launch" / "export.py", folder / "run"]
    done = subprocess.run([*command, "--to", "jsonl"], capture_output=True, text=True)
    assert done.returncode == 2 and "recipe.yaml is not there: give the recipe" in done.stderr
    (folder / "run" / "recipe.yaml").write_text(recipe.to_yaml())
    for target, (_, name, _) in TARGETS.items():
        done = subprocess.run([*command, "--to", target], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("4 of 8 rows written") and "only half" in done.stderr
        assert (folder / "run" / "export" / name).exists()
