"""The same rows in every format, and files that are damaged in every way."""

import csv
import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster_ds.distributed import Ranks
from cluster_ds.prepare import prepare_tokens
from cluster_ds.recipe_file import load_recipe
from cluster_ds.records import Source, read_records
from cluster_ds.sources import find_files, read_rows

ROWS = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"instruction": "Quote, \"it\".", "input": "", "output": "two\r\nlines\u2028here\x0b"},
    {"instruction": "Name.", "input": None, "output": "Ann"},
    {"instruction": "Name.", "input": "", "output": "Ann"},
]


def json_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_csv(rows, delimiter=","):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def chat_rows(rows, column, role, text, user, assistant):
    def ask(row):
        return f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]

    return [{column: [{role: user, text: ask(r)}, {role: assistant, text: r["output"]}]} for r in rows]


def write_formats(folder, rows):
    """The rows in each format that is read: name -> path."""
    folder.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(folder / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile(str(folder / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    pq.write_table(table, folder / "a.parquet", row_group_size=100)
    sharegpt = chat_rows(rows, "conversations", "from", "value", "human", "gpt")
    files = {
        "a.json": json.dumps(rows).encode(), "a.jsonl": json_lines(rows), "lines.json": json_lines(rows),
        "a.jsonl.gz": gzip.compress(json_lines(rows)), "a.csv": as_csv(rows), "a.tsv": as_csv(rows, "\t"),
        "a.csv.gz": gzip.compress(b"\xef\xbb\xbf" + as_csv(rows)),
        "messages.jsonl": json_lines(chat_rows(rows, "messages", "role", "content", "user", "assistant")),
        "sharegpt.json": json.dumps(sharegpt).encode(),
        "chats.csv": as_csv([{"messages": json.dumps(next(iter(row.values())))} for row in sharegpt]),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    for i in range(3):
        (folder / "shards").mkdir(exist_ok=True)
        third = rows[i * len(rows) // 3 : (i + 1) * len(rows) // 3]
        (folder / "shards" / f"part-{i}.jsonl").write_bytes(json_lines(third))
    paths = {name: folder / name for name in files}
    return {**paths, **{n: folder / n for n in ("file.arrow", "stream.arrow", "a.parquet", "shards")}, "glob": folder / "shards" / "*.jsonl"}


def test_every_format_gives_the_same_records(tmp_path):
    ids = {}
    for name, path in write_formats(tmp_path / "formats", ROWS).items():
        records, (report,) = read_records({"data": Source(str(path))})
        ids[name] = [r.id for r in records]
        assert report.num_rows == 4 and not report.bad and report.num_duplicates == 1, name
        assert records[1].turns[-1][1] == ROWS[1]["output"], name
    assert len({tuple(i) for i in ids.values()}) == 1, ids


def test_999_real_rows_give_the_same_ids_and_tokens(tmp_path, shared):
    rows = json.loads((shared / "data" / "instruct" / "alpaca_en_demo.json").read_text())
    assert len(rows) == 999
    seen = {}
    for name, path in write_formats(tmp_path / "formats", rows).items():
        recipe = load_recipe("tiny", [f"data.path={path}", "data.template=chat"])
        table = prepare_tokens(recipe, tmp_path / name / "run", Ranks(0, 1, 0))  # a cache of its own
        seen[name] = (tuple(table.ids), table.input_ids.tobytes(), table.supervised.tobytes())
    assert len(set(seen.values())) == 1 and len(seen) == 15


def test_a_mixture_keeps_the_names_of_its_sources(tmp_path):
    (tmp_path / "code.jsonl").write_bytes(json_lines(ROWS))
    (tmp_path / "chat.jsonl").write_bytes(json_lines(chat_rows(ROWS, "messages", "role", "content", "user", "assistant")))
    sources = {"code": Source(str(tmp_path / "code.jsonl")), "chat": Source(str(tmp_path / "chat.jsonl"))}
    records, reports = read_records(sources)
    assert [r.source for r in records] == ["code"] * 4 + ["chat"] * 4 and len({r.id for r in records}) == 8
    assert reports[1].lines()[0] == "chat: 4 rows read as messages (messages <- messages)"
    assert "chat: 4 rows repeat an earlier row; they are kept" in reports[1].lines()


def test_splits_of_a_folder(tmp_path):
    for name in ("data/train-00000.jsonl", "data/train-00001.jsonl", "data/validation.jsonl", "extra.jsonl", "state.json", ".x.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(json_lines(ROWS))
    files, notes = find_files(str(tmp_path))
    assert [name for name, _ in files] == ["data/train-00000.jsonl", "data/train-00001.jsonl"]
    assert notes[0].endswith("left out data/validation.jsonl, extra.jsonl, state.json")
    assert [name for name, _ in find_files(str(tmp_path), split="validation")[0]] == ["data/validation.jsonl"]
    rows, _ = read_rows(str(tmp_path))
    assert str(rows[5].place) == "data/train-00001.jsonl line 2"
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "test.jsonl").write_bytes(json_lines(ROWS))
    with pytest.raises(ValueError, match="has no files of split 'train', only test.jsonl: set data.split"):
        find_files(str(tmp_path / "only"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl.gz", b"no gzip", "is damaged: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(json_lines(ROWS))[:-9], "is damaged: Compressed file ended"),
        ("a.parquet", b"PAR1 nothing", "is not a whole Parquet file"),
        ("a.arrow", b"ARROW", "is neither an Arrow file nor an Arrow stream"),
        ("a.csv", as_csv(ROWS).decode().encode("utf-16"), "is UTF-16: convert it"),
        ("a.csv", b"a;b\n1;2\n", "the header 'a;b' has no ','"),
        ("a.csv", b"output,output\n1,2\n", "the header names 'output' twice"),
        ("a.json", b'{"data":\n [1]}', "holds a JSON object with the keys data, not a list of rows"),
        ("a.json", b"[1, 2", "is not a JSON document"),
        ("a.jsonl", b'"text"\n3\n', r"none of 2 rows is an object with columns; the first is a JSON text \(line 1\)"),
        ("a.jsonl", b"\n\n", "holds no rows"),
        ("a.txt", b"x", "not .txt"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as refusal:
        read_records({"data": Source(str(tmp_path / name))})
    assert str(tmp_path / name) in str(refusal.value)


def test_a_bad_byte_spoils_its_row_and_not_the_file(tmp_path):
    files = {
        "a.jsonl": json_lines(ROWS)[:-3] + b"\xff\"}\n",
        "a.csv": as_csv(ROWS).rstrip() + b"\xff\r\n",
        "a.json": json.dumps(ROWS).encode()[:-4] + b"\xff\"}]",
    }
    table = pa.table({
        "instruction": ["a"] * 4,
        "output": pa.array([b"fine", b"fine", b"fine", b"b\xff"]).view(pa.string()),
    })
    pq.write_table(table, tmp_path / "a.parquet")
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for name in (*files, "a.parquet"):
        records, (report,) = read_records({"data": Source(str(tmp_path / name))}, 0.5)
        assert len(records) == 3 and report.num_bad == 1 and "UTF-8" in next(iter(report.bad)), name


def test_numbers_of_a_table_keep_their_spelling(tmp_path):
    import datetime
    from decimal import Decimal

    columns = {
        "float32": pa.array([3.1], pa.float32()), "float64": pa.array([1.0]), "int": pa.array([7]), "bool": pa.array([True]),
        "decimal": pa.array([Decimal("3.10")]), "date": pa.array([datetime.date(2020, 1, 2)]),
        "dictionary": pa.array(["x"]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for column, text in zip(columns, ("3.1", "1.0", "7", "true", "3.10", "2020-01-02", "x"), strict=True):
        source = Source(str(tmp_path / "a.parquet"), columns={"instruction": "int", "response": column}, format="instruction_response")
        (record,), _ = read_records({"data": source})
        assert record.turns[1] == ("assistant", text)


def test_quotes_that_are_not_closed(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'instruction,output\na,b\n"c"d,e\nf,g\n"h,i\nj,k\n')
    records, (report,) = read_records({"data": Source(str(tmp_path / "a.csv"))}, 0.9)
    assert [r.turns[1][1] for r in records] == ["b", "g", "k"]  # what stands behind the open quote is not lost
    assert [p.number for places in report.bad.values() for p in places] == [3, 5]


def test_a_very_long_row(tmp_path):
    long = "word " * 400_000
    rows = [{"instruction": "q", "output": long}, {"instruction": "q", "output": "a"}]
    for name, data in (("a.jsonl", json_lines(rows)), ("a.csv", as_csv(rows))):
        (tmp_path / name).write_bytes(data)
        records, _ = read_records({"data": Source(str(tmp_path / name))})
        assert records[0].turns[1][1] == long


def test_prompt_and_completion_as_text_or_messages(tmp_path):
    rows = [
        {"prompt": "q", "completion": "a"},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
         "completion": [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"prompt": "q", "completion": [{"role": "assistant", "content": [{"type": "image_url", "image_url": "x"}]}]},
    ]
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows))
    records, (report,) = read_records({"data": Source(str(tmp_path / "a.jsonl"))}, 0.5)
    assert records[0].turns == (("user", "q"), ("assistant", "a"))
    assert records[1].turns == (("system", "s"), ("user", "q"), ("assistant", "ab"))
    assert list(report.bad) == ["content is a JSON list where text is expected"]


def test_tool_turns_and_what_is_not_used(tmp_path):
    turns = [
        {"from": "human", "value": "What is it?"}, {"from": "function_call", "value": "{\"name\": \"look\"}"},
        {"from": "observation", "value": "a cat"}, {"from": "gpt", "value": "A cat.", "weight": 0},
    ]
    calls = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]
    (tmp_path / "a.jsonl").write_bytes(json_lines([{"conversations": turns, "system": "Be brief.", "tools": "[]"}, {"conversations": calls}]))
    records, (report,) = read_records({"data": Source(str(tmp_path / "a.jsonl"))}, 0.5)
    assert [role for role, _ in records[0].turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert "not used: conversations.weight (1), tools (1)" in report.lines()
    assert "tool_calls" in next(iter(report.bad))


def test_an_open_quote_loses_nothing_behind_it(tmp_path):
    lines = [f"question {i},answer {i}" for i in range(10_000)]
    lines[199] = 'question 199,"answer 199'
    (tmp_path / "a.csv").write_text("instruction,output\n" + "\n".join(lines) + "\n")
    records, (report,) = read_records({"data": Source(str(tmp_path / "a.csv"))})
    assert len(records) == 9_999 and [str(p) for places in report.bad.values() for p in places] == ["line 201"]
    lines[:300] = ['q,"a'] * 300
    (tmp_path / "a.csv").write_text("instruction,output\n" + "\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="more than 200 quotes are not closed"):
        read_records({"data": Source(str(tmp_path / "a.csv"))}, 0.9)


def test_nan_is_a_missing_value(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"instruction": "q", "input": NaN, "output": "a"}\n{"instruction": "q", "output": NaN}\n')
    table = pa.table({"instruction": ["q", "q"], "input": pa.array([float("nan")] * 2, pa.float32()), "output": [1.5, float("nan")]})
    pq.write_table(table, tmp_path / "a.parquet")
    for name, answer in (("a.jsonl", "a"), ("a.parquet", "1.5")):
        (record,), (report,) = read_records({"data": Source(str(tmp_path / name))})
        assert record.turns[1] == ("assistant", answer) and record.context == "" and report.num_empty == 1


def test_columns_that_nobody_reads_disturb_nothing(tmp_path):
    columns = {
        "instruction": pa.array(["q"]), "output": pa.array(["a"]),
        "vector": pa.array([[1.0, 2.0]]), "bytes": pa.array([b"\xff\xfe"]), "interval": pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
        "broken": pa.array([[b"\xff"]], pa.list_(pa.binary())).cast(pa.list_(pa.binary())),
        "time": pa.array([2**62], pa.timestamp("us")), "zone": pa.array([0], pa.timestamp("s", tz="Nowhere/Land")),
    }
    table = pa.table(columns)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    (record,), (report,) = read_records({"data": Source(str(tmp_path / "a.arrow"))})
    assert record.turns == (("user", "q"), ("assistant", "a")) and "vector (1)" in "".join(report.lines())
    source = Source(str(tmp_path / "a.arrow"), format="instruction_response", columns={"response": "vector"})
    with pytest.raises(ValueError, match="vector is of type list<.*>, where text is expected"):
        read_records({"data": source})


def test_splits_of_ones_own_and_no_fallback_but_for_train(tmp_path):
    for name in ("part-0.jsonl", "train_sft.jsonl", "cache-0123.arrow"):
        (tmp_path / name).write_bytes(json_lines(ROWS))
    for split, found in (("train", "train_sft.jsonl"), ("train_sft", "train_sft.jsonl")):
        assert [name for name, _ in find_files(str(tmp_path), split=split)[0]] == [found]
    for split in ("validation", "trian"):
        with pytest.raises(ValueError, match=f"has no files of split '{split}', only part-0.jsonl, train_sft.jsonl"):
            find_files(str(tmp_path), split=split)


def test_folders_with_links_brackets_and_tildes(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.jsonl").write_bytes(json_lines(ROWS))
    folder = tmp_path / "data[v1]"
    folder.mkdir()
    (folder / "linked").symlink_to(elsewhere)
    assert [name for name, _ in find_files(str(folder))[0]] == ["linked/a.jsonl"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(read_rows("~/elsewhere/a.jsonl")[0]) == 4


@pytest.mark.parametrize(
    ("card", "subset", "split", "files"),
    [
        ("configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: '*.jsonl'\n  - split: test\n    path: test/*.jsonl", None, "train", ["root.jsonl"]),
        ("configs:\n- config_name: main\n  data_dir: main\n- config_name: other\n  data_dir: other", "other", "train", ["other/o.jsonl"]),
        ("configs:\n- config_name: default\n  data_files: '**/root.jsonl'", None, "train", ["root.jsonl"]),
        ("configs:\n- config_name: default\n  data_files:\n  - split: test\n    path: [test/t.jsonl]", None, "test", ["test/t.jsonl"]),
    ],
)
def test_the_card_of_a_hub_data_set(tmp_path, monkeypatch, card, subset, split, files):
    for name in ("root.jsonl", "test/t.jsonl", "main/m.jsonl", "other/o.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(json_lines(ROWS))
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n# Card\n")
    monkeypatch.setattr("cluster_ds.sources.download", lambda *_, **__: tmp_path)
    assert [name for name, _ in find_files("owner/name", split=split, subset=subset)[0]] == files


def test_cards_that_choose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster_ds.sources.download", lambda *_, **__: tmp_path)
    (tmp_path / "a.jsonl").write_bytes(json_lines(ROWS))
    (tmp_path / "README.md").write_text("---\nHello\n---\n")
    assert [name for name, _ in find_files("owner/name")[0]] == ["a.jsonl"]
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: a\n- config_name: b\n---\n")
    with pytest.raises(ValueError, match="owner/name has the subsets a, b: choose one with data.subset"):
        find_files("owner/name")
    with pytest.raises(ValueError, match="owner/name has no subset 'c': a, b"):
        find_files("owner/name", subset="c")


def test_chats_as_text_and_problems_that_are_no_code(tmp_path):
    prompt, completion = ([{"role": r, "content": t}] for r, t in (("user", "q"), ("assistant", "a")))
    (tmp_path / "a.csv").write_bytes(as_csv([{"prompt": json.dumps(prompt), "completion": json.dumps(completion)}]))
    assert read_records({"data": Source(str(tmp_path / "a.csv"))})[0][0].turns == (("user", "q"), ("assistant", "a"))
    (tmp_path / "a.jsonl").write_bytes(json_lines([{"problem": "2+2?", "solution": "4", "messages": prompt + completion}]))
    assert read_records({"data": Source(str(tmp_path / "a.jsonl"))})[1][0].format == "messages"
    (tmp_path / "b.jsonl").write_bytes(json_lines([{"problem": "2+2?", "solution": "4"}]))
    with pytest.raises(ValueError, match="has the columns problem, solution, which fit no format"):
        read_records({"data": Source(str(tmp_path / "b.jsonl"))})
    assert read_records({"data": Source(str(tmp_path / "b.jsonl"), format="oss_instruct")})[0]


def test_empty_answers_in_chats_are_counted(tmp_path):
    chats = [[("user", "q"), ("assistant", ""), ("user", "r"), ("assistant", "a")], [("user", "q"), ("assistant", "  \n")], [("user", "q"), ("assistant", "a")]]
    rows = [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in chats]
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows))
    records, (report,) = read_records({"data": Source(str(tmp_path / "a.jsonl"))})
    assert len(records) == 1 and report.num_empty == 2


def test_names_in_a_strange_encoding_are_printed(tmp_path):
    (tmp_path / "a.csv").write_bytes("instruction,output,cat\u00e9gorie\nq,a,x\n".encode("latin-1"))
    _, (report,) = read_records({"data": Source(str(tmp_path / "a.csv"))})
    "".join(report.lines()).encode()
    assert "not used: cat\\udce9gorie (1)" in report.lines()
