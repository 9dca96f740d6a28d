from dataclasses import replace

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


def test_the_audit(tmp_path):
    tokenizer = make_byte_tokenizer()
    rows = records(("q", "answer"), ("q" * 40, "a" * 40), ("left </s> over ### Response:", "b"), ("q" * 90, "c"))
    rows = [replace(record, place=f"line {i + 1}") for i, record in enumerate(rows)]
    table, _ = build(tmp_path, tokenizer, rows)
    supervised = [len("answer") + 1, 64 - 1 - 41, 2]  # BOS and the prompt's newline are not
    tokens = [1 + 2 + 7, 64, 1 + 29 + 2]
    assert table.report.lines(rows, 64) == [
        f"audit: {sum(supervised)} of {sum(tokens)} tokens supervised ({sum(supervised) / sum(tokens):.1%}); 2 of 3 rows end "
        "with an end marker that is learnt",
        "1 rows truncated to 64 tokens: their end is not learnt",
        "1 rows excluded: no supervised token left after truncation to 64 (line 4)",
        "1 rows hold markers of a template in their own text, tokenised as plain text; remove them if they are left over (line 3)",
    ]
    limits = {"max_bad_fraction": 0, "max_length": 64}
    table.report.require(max_masked_fraction=0.25, **limits)
    with pytest.raises(ValueError, match="1 of 4 rows have no supervised token within 64 tokens, more than data.max_masked_fraction 0.2"):
        table.report.require(max_masked_fraction=0.2, **limits)


def test_rows_that_the_template_cannot_hold_are_counted(tmp_path, byte_tokenizer):
    rows = [*records(("q", "a"), ("p", "b"), ("o", "c")), Record("r3", (("user", "q"), ("assistant", "a")) * 2, place="line 4")]
    table, _ = build(tmp_path, byte_tokenizer, rows)
    assert table.ids == ["r0", "r1", "r2"]
    kind = "template 'plain' holds one user and one assistant turn, not (user, assistant, user, assistant): use chat"
    assert f"1 bad rows: {kind} (line 4)" in table.report.lines(rows, 64)
    limits = {"max_masked_fraction": 0.5, "max_length": 64}
    table.report.require(max_bad_fraction=0.25, **limits)
    with pytest.raises(ValueError, match="1 of 4 rows do not fit the template, more than data.max_bad_fraction 0.01"):
        table.report.require(max_bad_fraction=0.01, **limits)


def test_a_tokenizer_without_pad_eos_and_bos(tmp_path):
    from cluster_ds.models import pad_token_id

    tokenizer = make_byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.bos_token = None
    rows = records(("q", "ab"))
    table, _ = build(tmp_path, tokenizer, rows)
    assert tokenizer.decode(table[0]["input_ids"].tolist()) == "q\nab"
    assert table[0]["labels"].tolist()[2:] == table[0]["input_ids"].tolist()[2:] and table.num_supervised.tolist() == [2]
    assert table.report.num_unended == 1 and pad_token_id(tokenizer) == 0
    assert any("no end marker: the tokenizer has no EOS" in line for line in table.report.lines(rows, 64))


def test_preview_marks_what_is_learnt(tmp_path, byte_tokenizer):
    from io import StringIO

    from rich.console import Console

    from cluster_ds.preview import print_preview

    table, _ = build(tmp_path, byte_tokenizer, records(("q1", "a1"), ("q2", "a2"), ("q3", "a3")))
    plain, colours = StringIO(), StringIO()
    print_preview(table, byte_tokenizer, 2, Console(file=plain, soft_wrap=True, highlight=False))
    assert plain.getvalue() == (
        "--- r0: 7 tokens, 3 supervised\n<bos>q1\n«a1<eos>»\n--- r2: 7 tokens, 3 supervised\n<bos>q3\n«a3<eos>»\n"
    )
    print_preview(table, byte_tokenizer, 1, Console(file=colours, force_terminal=True, color_system="standard"))
    assert "\x1b[1;32m«a1<eos>»\x1b[0m" in colours.getvalue()
