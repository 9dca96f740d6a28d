"""From rows to a plan in one process: mixtures, and vocabularies of another size than the tokenizer's."""

import json

import pyarrow.parquet as pq

from cluster_ds.distributed import Ranks
from cluster_ds.embedded import byte_tokenizer
from cluster_ds.plan import Plan
from cluster_ds.prepare import prepare
from cluster_ds.recipe_file import load_recipe

from .conftest import tiny_llama

RECIPE = """\
model: {{name_or_path: {model}}}
data:
  sources:
    counts: {{path: {folder}/counts.jsonl}}
    greetings: {{path: {folder}/greetings.json, columns: {{response: answer, instruction: question}}, format: instruction_response}}
  template: plain
  max_length: 64
selection: {{num_clusters: 2, min_fraction: 0.5, tokens_per_batch: 256}}
train: {{epochs: 1, global_batch_size: 4, micro_batch_size: 2, lr: 1e-3}}
deepspeed: {{config: cpu}}
"""


def made(folder, vocab_size, **model):
    """A prepared run over two sources."""
    tiny_llama(vocab_size=vocab_size, **model).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    counts = [{"instruction": f"count to {i}", "output": " ".join(map(str, range(i)))} for i in range(1, 13)]
    (folder / "counts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in counts))
    (folder / "greetings.json").write_text(json.dumps([{"question": f"greet {i}", "answer": f"hello {i}"} for i in range(8)]))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, model=folder / "model"))
    return prepare(load_recipe(str(folder / "recipe.yaml")), folder / "run", Ranks(0, 1, 0))


def test_sources_reach_the_plan(tmp_path, capsys):
    plan = made(tmp_path, 259).plan
    assert plan.source == ["counts"] * 12 + ["greetings"] * 8
    table = pq.read_table(tmp_path / "run" / "plan" / "table.parquet").to_pylist()
    assert [row["source"] for row in table] == plan.source == Plan.read(tmp_path / "run" / "plan").source
    kept = [sum(row["kept"] for row in table if row["source"] == name) for name in ("counts", "greetings")]
    by_cluster = [
        f"{sum(r['kept'] for r in table if (r['source'], r['cluster']) == ('counts', c))}/"
        f"{sum((r['source'], r['cluster']) == ('counts', c) for r in table)}" for c in range(2)
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert f"[plan] source counts: kept {kept[0]} of 12; by cluster {', '.join(by_cluster)}" in printed
    assert f"[plan] source greetings: kept {kept[1]} of 8" in printed
    assert "[tokens] greetings: 8 rows read as instruction_response (instruction <- question, response <- answer)" in printed


def test_a_vocabulary_that_was_resized(tmp_path):
    """More embeddings than the tokenizer has tokens, with tied and untied heads."""
    for tied in (True, False):
        folder = tmp_path / str(tied)
        folder.mkdir()
        plan = made(folder, 320, tie_word_embeddings=tied).plan
        assert len(plan) == 20 and plan.kept.any()
