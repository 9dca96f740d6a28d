"""R cases: reading."""

import pytest

from .support import INPUTS, prep, texts

EOS = "<eos>"


def answers(table, tokenizer):
    return [supervised.removesuffix(EOS) for _, supervised in texts(table, tokenizer)]


def test_R02_codes_that_look_like_numbers(tmp_path, byte_tokenizer):
    table = prep(tmp_path, "r02_codes.csv", max_length=512)
    assert answers(table, byte_tokenizer) == [
        "00795", "1e5", "0x1F", "3.10", "10", "1_000", "007", "+5", "1.0", "12345678901234567890", "0.30000000000000004",
    ]


def test_R03_a_byte_order_mark_changes_nothing(tmp_path, byte_tokenizer):
    with_mark, without = (prep(tmp_path, f"r03_{name}.jsonl", template="chat") for name in ("bom", "nobom"))
    assert with_mark.ids == without.ids and len(with_mark) == 3
    assert with_mark.input_ids.tolist() == without.input_ids.tolist()
    assert with_mark.supervised.tolist() == without.supervised.tolist()
    assert not any("\ufeff" in part for pair in texts(with_mark, byte_tokenizer) for part in pair)


def test_R04_line_separators_inside_strings(tmp_path, byte_tokenizer, capsys):
    table = prep(tmp_path, "r04_separators.jsonl", max_length=512)
    assert "6 rows read" in (out := capsys.readouterr().out) and "bad rows" not in out
    assert answers(table, byte_tokenizer) == [
        "first\u2028second", "first\u2029second", "first\u0085second", "first\x0bsecond\x0cthird", "first\r\nsecond", "plain",
    ]


def test_R06_a_first_shard_of_nulls(tmp_path, byte_tokenizer):
    table = prep(tmp_path, "r06_first_null", max_length=512)
    prompts = [prompt for prompt, _ in texts(table, byte_tokenizer)]
    assert len(prompts) == 10
    assert ["### Input:" in p for p in prompts] == [False] * 5 + [True] * 5
    assert answers(table, byte_tokenizer)[5:] == ["cat", "dog", "bread", "water", "milk"]


def test_R07_several_types_in_a_column(tmp_path, byte_tokenizer, capsys):
    table = prep(tmp_path, "r07_mixed_types.json", max_length=512, max_bad_fraction=0.5)
    out = capsys.readouterr().out
    assert answers(table, byte_tokenizer) == ["1a", "12", "12.5", "true", "12", "0", "false"]
    assert "1 rows excluded: empty response" in out
    assert "output is a JSON list where text is expected (row 8)" in out
    assert "output is a JSON object where text is expected (row 9)" in out


def test_R08_the_answer_is_an_object(tmp_path):
    with pytest.raises(ValueError, match="3 of 4 rows are bad") as refusal:
        prep(tmp_path, "r08_object_output.json")
    message = str(refusal.value)
    assert "output is a JSON object where text is expected (rows 1, 2)" in message
    assert "output is a JSON list where text is expected (row 3)" in message
    assert "write objects as JSON text" in message and "data.columns" in message


def test_R09_odd_orders_of_turns(tmp_path, byte_tokenizer, capsys):
    table = prep(tmp_path, "r09_turn_order.json", template="chat", max_bad_fraction=0.5)
    out, pairs = capsys.readouterr().out, texts(table, byte_tokenizer)
    assert "7 rows read as sharegpt" in out and len(table) == 5
    assert "1 rows excluded: empty response" in out
    assert "unknown role 'bot'; known: system, user, human, assistant, gpt" in out and "(row 7)" in out
    assert "1 turns behind the last answer left out" in out  # D-dangling
    learnt = " ".join(supervised for _, supervised in pairs)
    for answer in ("A-greeting", "A-answer", "B-answer", "C-answer-one", "C-answer-two", "D-answer", "E-answer"):
        assert answer in learnt
    assert "D-dangling" not in "".join(map("".join, pairs))
    assert pairs[1][0].index("B-first") < pairs[1][0].index("B-second") and "E-rule" in pairs[4][0]


def test_R12_columns_that_are_all_null(tmp_path, byte_tokenizer):
    with pytest.raises(ValueError, match="instruction is empty in 6 of 6 rows") as refusal:
        prep(tmp_path, "r12_null_columns.jsonl")
    assert "input, instruction, num_jobs, output, prompt_text" in str(refusal.value) and "data.columns" in str(refusal.value)
    table = prep(tmp_path, "r12_null_columns.jsonl", columns="{instruction: prompt_text}", max_length=512)
    assert len(table) == 6
    assert not any("None" in prompt for prompt, _ in texts(table, byte_tokenizer))


def test_R13_a_folder_with_train_and_test_files(tmp_path, byte_tokenizer, capsys):
    table = prep(tmp_path, "r13_splits", max_length=512)
    assert answers(table, byte_tokenizer) == [f"train answer {i}" for i in range(6)]
    assert "left out README.md, test.jsonl" in capsys.readouterr().out
    assert len(prep(tmp_path, str(INPUTS / "r13_splits" / "*.jsonl"), max_length=512)) == 9
    held_out = prep(tmp_path, "r13_splits", split="test", max_length=512)
    assert answers(held_out, byte_tokenizer) == [f"held-out answer {i}" for i in range(3)]


def test_R15_rows_with_too_many_or_too_few_fields(tmp_path, byte_tokenizer, capsys):
    with pytest.raises(ValueError, match="2 of 6 rows are bad"):
        prep(tmp_path, "r15_ragged.csv")
    table = prep(tmp_path, "r15_ragged.csv", max_bad_fraction=0.5, max_length=512)
    out = capsys.readouterr().out
    assert "4 fields where the header has 3 (line 4)" in out and "2 fields where the header has 3 (line 6)" in out
    assert answers(table, byte_tokenizer) == ["pear", "iron", "Rhine", "line one\nline two, with a comma"]
