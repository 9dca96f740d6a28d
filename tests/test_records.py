import json

import pytest

from cluster_ds.records import Source, content_hash
from cluster_ds.records import read_records as read_sources


def read_records(path, max_bad_fraction=0.01, **how):
    """One source, its one report."""
    records, (report,) = read_sources({"data": Source(path, **how)}, max_bad_fraction)
    return records, report


def write(path, rows, bom=False):
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows) if path.suffix == ".jsonl" else json.dumps(rows)
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + text.encode())
    return str(path)


ALPACA = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"instruction": "Greet.", "input": "", "output": "Hello."},
    {"instruction": "Name.", "input": "<noinput>", "output": "Ann"},
]


def test_formats_are_detected(tmp_path):
    cases = {
        "alpaca": {"instruction": "a", "input": "", "output": "b"},
        "oss_instruct": {"lang": "python", "problem": "a", "solution": "b"},
        "instruction_response": {"instruction": "a", "response": "b"},
        "messages": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    }
    for name, row in cases.items():
        (record,), report = read_records(write(tmp_path / f"{name}.jsonl", [row]))
        assert report.format == name
        prompt = "Write a solution to the following coding problem:\na" if name == "oss_instruct" else "a"
        assert record.turns == (("user", prompt), ("assistant", "b"))


def test_the_input_column(tmp_path):
    records, _ = read_records(write(tmp_path / "a.json", ALPACA))
    assert [r.context for r in records] == ["1 2", "", ""]


def test_json_jsonl_and_a_byte_order_mark_give_the_same_ids(tmp_path):
    files = [write(tmp_path / "a.json", ALPACA), write(tmp_path / "a.jsonl", ALPACA), write(tmp_path / "b.jsonl", ALPACA, True)]
    read = [read_records(f)[0] for f in files]
    assert read[0] == read[1] == read[2]
    assert len({content_hash(r) for r in read}) == 1


def test_ids_hold_content_and_occurrence(tmp_path):
    rows = [ALPACA[1], ALPACA[0], ALPACA[1]]
    records, report = read_records(write(tmp_path / "a.jsonl", rows))
    assert report.num_duplicates == 1
    a, b, c = (r.id for r in records)
    assert a.endswith("-0") and c == a[:-1] + "1" and b[:-2] != a[:-2]


def test_line_separators_inside_strings(tmp_path):
    text = "a\u2028b\u2029c\u0085d\x0be\r\nf"
    path = write(tmp_path / "a.jsonl", [{"instruction": "q", "output": text}] * 2)
    path_bytes = open(path, "rb").read().replace(b"\n", b"\r\n", 1)
    open(path, "wb").write(path_bytes)
    records, report = read_records(path)
    assert report.num_rows == 2 and [r.turns[1][1] for r in records] == [text, text]


def test_scalars_take_their_json_spelling_and_zero_is_an_answer(tmp_path):
    values = [12, 12.5, True, "12", 0, False, None]
    rows = [{"instruction": f"q{i}", "output": v} for i, v in enumerate(values)]
    records, report = read_records(write(tmp_path / "a.jsonl", rows))
    assert [r.turns[1][1] for r in records] == ["12", "12.5", "true", "12", "0", "false"]
    assert report.num_empty == 1 and report.num_bad == 0


def test_bad_rows_are_named_and_bounded(tmp_path):
    rows = [{"instruction": "q", "output": "a"}] * 7 + [{"instruction": "q", "output": ["a"]}, ["row"]]
    path = write(tmp_path / "a.jsonl", rows)
    with open(path, "ab") as file:
        file.write(b'{"instruction": \n{"instruction": "\xff", "output": "x"}\n{"instruction":"q","output":"\\ud800"}\n')
    with pytest.raises(ValueError, match=r"5 of 12 rows are bad, more than data.max_bad_fraction 0.01") as error:
        read_records(path)
    for line in (
        "output is a JSON list where text is expected (line 8)", "a JSON list instead of an object (line 9)",
        "not JSON (line 10)", "not UTF-8 (line 11)", "half of a surrogate pair) (line 12)",
    ):
        assert line in str(error.value)
    records, report = read_records(path, max_bad_fraction=0.5)
    assert len(records) == 7 and report.num_bad == 5


def test_chats(tmp_path):
    def chat(*turns):
        return {"messages": [{"role": r, "content": c} for r, c in turns]}

    rows = [
        chat(("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "u2"), ("assistant", "a2"), ("user", "open")),
        chat(("user", "u")),
        chat(("user", "u"), ("bot", "a")),
        {"messages": None},
    ]
    records, report = read_records(write(tmp_path / "a.jsonl", rows), max_bad_fraction=0.5)
    assert [r for r, _ in records[0].turns] == ["system", "user", "assistant", "user", "assistant"]
    assert report.num_empty == 1
    unknown, null = sorted(report.bad, reverse=True)
    assert unknown.startswith("unknown role 'bot'; known: system, user, human, assistant, gpt")
    assert null == "messages is a JSON null, not a list of messages"


def test_column_map_and_what_to_do_without_one(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(ValueError, match="has the columns answer, question, which fit no format.*data.columns"):
        read_records(path)
    columns = {"instruction": "question", "response": "answer"}
    (record,), report = read_records(path, format="instruction_response", columns=columns)
    assert record.turns[0] == ("user", "q") and report.columns == columns
    null = write(tmp_path / "b.jsonl", [{"instruction": None, "prompt": "q", "output": "a"}] * 6)
    with pytest.raises(ValueError, match="instruction is empty in 6 of 6 rows; the columns are instruction, output, prompt"):
        read_records(null)
    assert read_records(null, columns={"instruction": "prompt"})[0][0].turns[0][1] == "q"


def test_missing_or_strange_files(tmp_path):
    with pytest.raises(ValueError, match="nowhere.jsonl does not exist"):
        read_records(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="expected .json, .jsonl, .csv, .tsv, .parquet, .arrow .or these with .gz., not .txt"):
        read_records(str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="holds a JSON object, not a list of rows"):
        (tmp_path / "a.json").write_text("{}")
        read_records(str(tmp_path / "a.json"))
    with pytest.raises(ValueError, match="no format 'alpca': auto, messages, sharegpt, oss_instruct"):
        read_records(write(tmp_path / "d.jsonl", ALPACA), format="alpca")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no data file"):
        read_records(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="holds no rows"):
        (tmp_path / "b.jsonl").write_text("\n")
        read_records(str(tmp_path / "b.jsonl"))
    with pytest.raises(ValueError, match="none of 2 rows is usable"):
        read_records(write(tmp_path / "c.jsonl", [{"instruction": "q", "output": ""}] * 2))


def test_real_instructions(shared):
    records, report = read_records(str(shared / "data" / "instruct" / "alpaca_en_demo.json"))
    assert report.num_rows == 999 and report.format == "alpaca" and not report.bad
    assert len({r.id for r in records}) == len(records)


def test_numbers_keep_their_spelling_and_rows_their_place(tmp_path):
    path = tmp_path / "a.jsonl"
    digits = "9" * 5000
    lines = [
        '{"instruction": "q", "output": 1E5}', "", '{"instruction": "q", "output": 3.10}', "not json",
        '{"instruction": "q", "output": ' + digits + "}", "[" * 100_000,
    ]
    path.write_text("\n".join(lines))
    records, report = read_records(str(path), max_bad_fraction=0.5)
    assert [r.turns[1][1] for r in records] == ["1E5", "3.10", digits]
    assert {k: [p.number for p in v] for k, v in report.bad.items()} == {"not JSON": [4, 6]} and report.num_rows == 5  # as an editor counts them


def test_an_input_column_beside_a_response(tmp_path):
    rows = [{"instruction": "q", "input": "ctx", "response": "a"}]
    (record,), report = read_records(write(tmp_path / "a.jsonl", rows))
    assert record.context == "ctx" and report.columns["input"] == "input"


def test_unanswered_turns_are_counted(tmp_path):
    turns = [{"role": r, "content": r} for r in ("user", "assistant", "user", "user")]
    (record,), report = read_records(write(tmp_path / "a.jsonl", [{"messages": turns}]))
    assert len(record.turns) == 2 and "2 turns behind the last answer left out" in report.lines()


def test_a_hub_id_may_hold_a_dot():
    with pytest.raises(ValueError, match="neither a path nor in .*switched off.*launch/recipe.py fetch"):
        read_records("teknium/OpenHermes-2.5")
