"""Two rows of each data set's form through its recipe: the exact tokens outside and inside of the loss.

The tokenizer is a real Llama-family sentencepiece model of 32,000 pieces (mistral-common's). CodeLlama's and Llama-2's own
cannot be fetched here: their pieces, and so these very tokens, may differ. What holds for any such model is the layout: BOS
once, the template's text, where the loss begins, the dummy prefix of an answer that is tokenised apart, EOS inside.
"""

import json
from pathlib import Path

import pytest

from cluster_ds.models import sentencepiece_differences
from cluster_ds.prepare import train_sources
from cluster_ds.recipe_file import load_recipe
from cluster_ds.records import read_records
from cluster_ds.templates import get_template
from cluster_ds.tokens import tokenize_sample

ROWS = {
    "magicoder_7b": [
        {
            "lang": "python", "index": 1, "problem": "Return the sum of a list.",
            "solution": "```python\ndef total(xs):\n    return sum(xs)\n```",
        },
        {"lang": "cpp", "index": 2, "problem": "Print n dots,\nwithout a loop.", "solution": "std::string(n, '.')"},
    ],
    "evol_7b": [
        {"instruction": "Write a function to double x.", "output": "def double(x):\n\treturn 2 * x\n"},
        {"instruction": "What does `git add -p` do?", "output": "It stages hunks, one by one: été."},
    ],
    "medinstruct_7b": [
        {"instruction": "Name the drug class.", "input": "<noinput>", "output": "Beta blockers."},
        {"instruction": "Is it urgent?", "input": "Chest pain for 2 hours.", "output": " Yes, call 112."},
    ],
}
GOLDEN = Path(__file__).parent / "golden_tokens.json"


def samples(name, tokenizer, tmp_path):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(ROWS[name]))
    recipe = load_recipe(name, [f"data.path={path}"])
    records, _ = read_records(train_sources(recipe), 0.0)
    template = get_template(recipe.data.template, tokenizer)
    out = []
    for record in records:
        sample = tokenize_sample(record, template, tokenizer, recipe.data.max_length)
        pieces = tokenizer.convert_ids_to_tokens(sample.ids)
        first = sample.supervised.index(True)
        assert all(sample.supervised[first:]) and not sample.truncated
        out.append({"outside": pieces[:first], "inside": pieces[first:]})
    return out


@pytest.mark.parametrize("name", list(ROWS))
def test_golden_tokens(sentencepiece_tokenizer, tmp_path, name):
    assert samples(name, sentencepiece_tokenizer, tmp_path) == json.loads(GOLDEN.read_text())[name]


@pytest.mark.parametrize("name", list(ROWS))
def test_golden_tokens_are_sentencepieces(name):
    """The file itself, against the sentencepiece library: nothing of the product or of transformers is involved."""
    library = pytest.importorskip("sentencepiece")
    mistral_common = pytest.importorskip("mistral_common")
    model = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
    encode = library.SentencePieceProcessor(str(model)).encode
    head = (
        "You are an exceptionally intelligent coding assistant that consistently delivers accurate and reliable responses "
        "to user instructions.\n\n@@ Instruction\n"
    )
    alpaca = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{}\n\n### Response:",
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a response "
        "that appropriately completes the request.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:",
    )
    for row, golden in zip(ROWS[name], json.loads(GOLDEN.read_text())[name], strict=True):
        if name == "medinstruct_7b":  # jointly: no dummy prefix before the answer
            has_input = row["input"] != "<noinput>"
            prompt = alpaca[has_input].format(row["instruction"], row["input"])
            whole = encode(prompt + row["output"], out_type=str)
            assert golden["outside"] + golden["inside"] == ["<s>", *whole, "</s>"]
            assert golden["outside"] == ["<s>", *encode(prompt, out_type=str)]
            continue
        if name == "magicoder_7b":
            instruction, answer = f"Write a solution to the following coding problem:\n{row['problem']}", row["solution"]
        else:
            instruction, answer = row["instruction"], row["output"]
        prompt = f"{head}{instruction}\n\n@@ Response\n"
        assert golden["outside"] == ["<s>", *encode(prompt, out_type=str)]
        assert golden["inside"] == [*encode(answer, out_type=str), "</s>"]


def test_indentation_is_split_as_sentencepiece_does(sentencepiece_tokenizer, tmp_path):
    """transformers 5.24 alone orders merges by piece number when a model brings no tokenizer.json, and splits code otherwise."""
    from transformers import AutoTokenizer

    pieces = sentencepiece_tokenizer.tokenize("def f(x):\n    return x")
    assert pieces[-4:] == ["<0x0A>", "▁▁▁", "▁return", "▁x"]
    folder = Path(sentencepiece_tokenizer.name_or_path)
    assert sentencepiece_differences(folder, sentencepiece_tokenizer) == []
    alone = AutoTokenizer.from_pretrained(folder)
    warning = sentencepiece_differences(folder, alone)[0]
    assert "'▁▁▁▁', 'return'" in warning and "'▁▁▁', '▁return'" in warning
    sentencepiece_tokenizer.save_pretrained(tmp_path)  # as an export does
    assert AutoTokenizer.from_pretrained(tmp_path).tokenize("def f(x):\n    return x") == pieces
