import numpy as np
import pytest

from cluster_ds.embedded import byte_tokenizer as make_byte_tokenizer
from cluster_ds.records import Record
from cluster_ds.templates import get_template
from cluster_ds.tokens import build_tokens, pad_batch


def records(*pairs):
    return [Record(f"r{i}", (("user", q), ("assistant", a))) for i, (q, a) in enumerate(pairs)]


def build(tmp_path, tokenizer, rows, name="plain", max_length=64):
    return build_tokens(rows, get_template(name, tokenizer), tokenizer, max_length, tmp_path)


def test_table(tmp_path, byte_tokenizer):
    table, cached = build(tmp_path, byte_tokenizer, records(("ab", "xyz"), ("c", "d")))
    assert not cached and table.ids == ["r0", "r1"]
    assert table.num_tokens.tolist() == [1 + 3 + 3 + 1, 1 + 2 + 1 + 1]  # BOS, prompt with newline, answer, EOS
    assert table.num_supervised.tolist() == [4, 2]
    sample = table[0]
    assert byte_tokenizer.decode(sample["input_ids"]) == "<bos>ab\nxyz<eos>"
    assert sample["labels"].tolist() == [-100] * 4 + sample["input_ids"].tolist()[4:]


def test_truncation_and_rows_without_a_supervised_token(tmp_path, byte_tokenizer):
    rows = records(("q", "a"), ("q" * 70, "a"), ("q", "a" * 70), ("q" * 61, "a"))
    table, _ = build(tmp_path, byte_tokenizer, rows)
    assert table.ids == ["r0", "r2", "r3"]  # r1's prompt alone fills the window
    assert table.report.num_truncated == 2 and table.report.unsupervised == [1]
    assert table.num_supervised.tolist() == [2, 61, 1]
    assert [row[-1] == byte_tokenizer.eos_token_id for row in (table[i]["input_ids"] for i in range(3))] == [
        True, False, False,
    ]
    with pytest.raises(ValueError, match="no supervised token left in any of 1 rows.*max_length 64"):
        build(tmp_path, byte_tokenizer, rows[1:2])


def test_a_first_token_that_nothing_predicts_is_not_counted(tmp_path):
    tokenizer = make_byte_tokenizer()
    tokenizer.bos_token = None
    record = Record("r", (("user", ""), ("assistant", "abc")))
    template = get_template("plain", tokenizer)
    table, _ = build_tokens([record], template, tokenizer, 8, tmp_path)
    assert table.num_supervised.tolist() == [4]  # the newline of the empty prompt predicts a; a, b, c, EOS


def test_the_cache_sees_every_change_and_nothing_else(tmp_path, byte_tokenizer):
    rows = records(("q", "a"), ("p", "b"))
    other = make_byte_tokenizer()
    other.chat_template = other.chat_template.replace("[", "<")
    bigger = make_byte_tokenizer()
    bigger.add_tokens(["qq"])
    variants = [
        (byte_tokenizer, rows, "plain", 64), (byte_tokenizer, rows, "alpaca", 640), (byte_tokenizer, rows, "plain", 63),
        (byte_tokenizer, records(("q", "a"), ("p", "c")), "plain", 64), (byte_tokenizer, rows[::-1], "plain", 64),
        (byte_tokenizer, rows, "chat", 64), (other, rows, "chat", 64), (bigger, rows, "plain", 64),
    ]
    # Record ids are content hashes outside this test; here they stand for the content.
    variants[3][1][1] = Record("r9", (("user", "p"), ("assistant", "c")))
    keys = {build(tmp_path, *variant)[0].key for variant in variants}
    assert len(keys) == len(variants)
    assert all(build(tmp_path, *variant)[1] for variant in variants)  # all from the cache now
    assert sorted(p.name for p in (tmp_path / "tokens").iterdir()) == sorted(keys)


def test_padding_is_told_by_position(byte_tokenizer):
    eos = byte_tokenizer.eos_token_id
    samples = [
        {"input_ids": np.array([1, 5, eos]), "labels": np.array([-100, 5, eos])},
        {"input_ids": np.array([1, 5, 6, 7, eos]), "labels": np.array([-100, -100, 6, 7, eos])},
    ]
    batch = pad_batch(samples, pad_id=eos)
    assert batch["input_ids"].tolist() == [[1, 5, eos, eos, eos], [1, 5, 6, 7, eos]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["labels"].tolist() == [[-100, 5, eos, -100, -100], [-100, -100, 6, 7, eos]]


def test_a_damaged_cache_is_named(tmp_path, byte_tokenizer):
    table, _ = build(tmp_path, byte_tokenizer, records(("q", "a")))
    path = table.folder / "input_ids.npy"
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    with pytest.raises(ValueError, match="token cache .* is damaged: delete it"):
        build(tmp_path, byte_tokenizer, records(("q", "a")))
