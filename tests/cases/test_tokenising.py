"""T cases: tokenising, templates and masks."""

import json
import shutil

import numpy as np
import pytest

from cluster_ds.models import pad_token_id
from cluster_ds.records import Source, read_records
from cluster_ds.templates import get_template, render
from cluster_ds.tokens import build_tokens, pad_batch

from .support import INPUTS, plan_of, prep, texts


def table_of(folder, name, tokenizer, template, max_length=4096):
    records, _ = read_records({"data": Source(str(INPUTS / name))})
    template = get_template(template, tokenizer)
    return records, template, build_tokens(records, template, tokenizer, max_length, folder)[0]


@pytest.mark.parametrize("template", ["alpaca", "magicoder"])
@pytest.mark.parametrize("which", ["smollm2", "sentencepiece_tokenizer"])
def test_T01_the_first_characters_of_the_answer(tmp_path, request, which, template):
    tokenizer = request.getfixturevalue(which)
    records, layout, table = table_of(tmp_path, "t01_boundary.jsonl", tokenizer, template)
    assert len(table) == 10 and not table.report.unsupervised
    sentencepiece = which != "smollm2"
    straddling = 0
    for i, record in enumerate(records):
        sample, answer = table[i], record.turns[1][1]
        prompt = render(layout, record.turns, "", tokenizer)[0].text
        learnt = sample["labels"] != -100
        assert (np.diff(learnt.astype(int)) >= 0).all()  # prompt, then answer
        ids = sample["input_ids"].tolist()
        assert ids[-1] == tokenizer.eos_token_id and learnt[-1]
        ids = ids[:-1] if tokenizer.bos_token_id != ids[0] else ids[1:-1]

        def text(tokens, tokenizer=tokenizer):
            return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

        count = int(learnt.sum()) - 1
        if template == "magicoder":  # each part has its own dummy prefix in sentencepiece, which decoding removes
            whole = text(ids[:-count]) + text(ids[-count:])
        else:
            whole = text(ids)
        expected = prompt + answer
        assert whole == (expected.replace("\u2581", " ") if sentencepiece else expected), repr(answer)
        border = text(ids[:-count])
        straddling += border != prompt
        assert prompt.startswith(border) and len(prompt) - len(border) <= 1
    assert straddling == table.report.num_straddling


def test_T02_padding_with_eos_hides_no_end(tmp_path, smollm2, capsys):
    tokenizer = smollm2
    tokenizer.pad_token = None
    pad = pad_token_id(tokenizer)
    assert pad == tokenizer.eos_token_id
    _, _, table = table_of(tmp_path, "t02_eos.jsonl", tokenizer, "alpaca")
    batch = pad_batch([table[i] for i in range(6)], pad)
    assert (batch["labels"] == pad).sum() == 6
    for row, length in enumerate(table.num_tokens):
        assert batch["labels"][row, length - 1] == pad
        assert (batch["labels"][row, length:] == -100).all() and (batch["attention_mask"][row] == (np.arange(batch["labels"].shape[1]) < length)).all()
    records, _, short = table_of(tmp_path, "t02_eos.jsonl", tokenizer, "alpaca", max_length=100)
    batch = pad_batch([short[i] for i in range(6)], pad)
    assert (batch["labels"] == pad).sum() == 5
    assert "1 rows truncated to 100 tokens: their end is not learnt" in short.report.lines(records, 100)


def test_T03_every_answer_is_trained(tmp_path, byte_tokenizer):
    table = prep(tmp_path, "t03_multi_turn.json", template="chat")
    learnt = [supervised for _, supervised in texts(table, byte_tokenizer)]
    assert learnt == [
        "alpha answer<eos>", "beta answer<eos>gamma answer<eos>", "delta answer<eos>epsilon answer<eos>zeta answer<eos>",
    ]


def test_T05_one_bos(tmp_path):
    from cluster_ds.embedded import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (INPUTS / "t05_bos.jinja").read_text()
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    assert tokenizer("x")["input_ids"][0] == bos  # it prepends BOS by itself
    for template in ("chat", "alpaca"):
        name = "t05_bos.jsonl"
        if template == "alpaca":
            name = str(tmp_path / "rows.jsonl")
            rows = [{"instruction": "Name a colour.", "output": "Teal."}]
            (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        records, _, table = table_of(tmp_path, name, tokenizer, template)
        for i, record in enumerate(records):
            ids = table[i]["input_ids"].tolist()
            assert ids[0] == bos and ids.count(bos) == 1
            if template == "chat":  # generation starts from the same prompt
                messages = [{"role": role, "content": text} for role, text in record.turns[:-1]]
                prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
                assert ids[: len(prompt)] == list(prompt)


def test_T07_the_prompt_alone_fills_the_window(tmp_path, capsys):
    prepared = plan_of(
        tmp_path, "t07_long_prompt.jsonl", "selection.num_clusters=1", "train.global_batch_size=2", "train.micro_batch_size=1",
        template="plain", max_length=64,
    )
    out = capsys.readouterr().out
    assert "2 rows excluded: no supervised token left after truncation to 64 (line 1, line 3)" in out
    plan = prepared.plan
    assert len(plan) == 3 and plan.manifest["sizes"] == [3] and plan.manifest["weights"] == [1.0]
    assert plan.manifest["excluded"] == {"zero proxy": 0, "near-duplicate": 0} and np.isfinite(plan.distance).all() and np.isfinite(plan.loss).all()
    rows = (INPUTS / "t07_long_prompt.jsonl").read_text().splitlines()
    (tmp_path / "long.jsonl").write_text("\n".join([rows[0], rows[2]]))
    with pytest.raises(ValueError, match="no supervised token left in any of 2 rows after truncation to data.max_length 64"):
        prep(tmp_path, str(tmp_path / "long.jsonl"), template="plain", max_length=64)
    shutil.copy(INPUTS / "t07_long_prompt.jsonl", tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="2 of 5 rows have no supervised token within 64 tokens, more than data.max_masked_fraction 0.1"):
        prep(tmp_path, str(tmp_path / "rows.jsonl"), template="plain", max_length=64, max_masked_fraction=0.1)
