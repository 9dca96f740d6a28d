"""S06: a cache that sees every change."""

import json
import shutil

import pytest

from cluster_ds.distributed import Ranks
from cluster_ds.embedded import resolve_model
from cluster_ds.prepare import prepare, prepare_tokens
from cluster_ds.recipe_file import load_recipe

from .support import INPUTS, texts


def test_S06_a_cache_sees_every_change(tmp_path, byte_tokenizer):
    rows = tmp_path / "rows.jsonl"
    shutil.copy(INPUTS / "s06_a.jsonl", rows)
    base = resolve_model("embedded:tiny")
    other, edited = tmp_path / "other_vocabulary", tmp_path / "edited_template"
    for folder in (other, edited):
        shutil.copytree(base, folder)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]  # the same class and size
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = edited / "chat_template.jinja"
    template.write_text(template.read_text().replace("[", "<"))
    ranks = Ranks(0, 1, 0)

    def prep(*settings):
        recipe = load_recipe("tiny", [f"data.path={rows}", "data.max_length=400", "train.global_batch_size=4", *settings])
        return prepare_tokens(recipe, tmp_path / "run", ranks)

    def entries():
        return {p.name for p in (tmp_path / "cache" / "tokens").iterdir()}

    first = ("data.template=alpaca",)
    variants = [
        first, ("data.template=magicoder",), (*first, "data.max_length=401"), (*first, f"model.name_or_path={other}"),
        ("data.template=chat",), ("data.template=chat", f"model.name_or_path={edited}"),
    ]
    keys = [prep(*variant).key for variant in variants]
    assert len(set(keys)) == 6
    plan = load_recipe("tiny", [f"data.path={rows}", "data.max_length=400", "train.global_batch_size=4", *first])
    prepare(plan, tmp_path / "run", ranks)

    stat = rows.stat()
    changed = (INPUTS / "s06_b.jsonl").read_bytes()
    assert len(changed) == stat.st_size
    rows.write_bytes(changed)
    import os

    os.utime(rows, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    seventh = prep(*first)
    assert seventh.key not in keys and len(entries()) == 7
    assert [learnt for _, learnt in texts(seventh, byte_tokenizer)] == ["a dog, grey<eos>"] * 6
    with pytest.raises(ValueError, match="was made from something else:\n  data: plan"):
        prepare(plan, tmp_path / "run", ranks)
    shutil.copy(INPUTS / "s06_a.jsonl", rows)
    assert prep(*first).key == keys[0] and len(entries()) == 7
