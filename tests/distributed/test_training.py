"""prepare() and train() of a small recipe on two ranks: every precision, ZeRO stage and optimizer, exported and reloaded."""

import json
from pathlib import Path

import pytest
import torch

from cluster_ds.recipe import load_recipe

from ..conftest import tiny_llama
from .ranks import run_on_ranks

pytestmark = pytest.mark.distributed

RUNS = {  # name: (tied embeddings, overrides)
    "stage0": (True, ["deepspeed.config=zero0", "train.precision=fp32"]),
    "stage2": (True, ["deepspeed.config=zero2", "train.precision=fp32"]),
    "stage3": (True, ["deepspeed.config=zero3", "train.precision=fp32"]),
    "untied2": (False, ["deepspeed.config=zero2", "train.precision=fp32"]),
    "untied3": (False, ["deepspeed.config=zero3", "train.precision=fp32"]),
    "bf16_0": (True, ["deepspeed.config=zero0"]),
    "bf16_1": (True, ["deepspeed.config=zero1"]),
    "bf16_2": (True, ["deepspeed.config=zero2"]),
    "bf16_3": (True, ["deepspeed.config=zero3"]),
    "autocast": (True, ["deepspeed.config=zero0", "train.precision=bf16_autocast", "train.optimizer=adafactor"]),
    "pure_bf16": (True, ["deepspeed.config=zero0", "train.precision=pure_bf16", "train.optimizer=adafactor"]),
    "checkpointing": (True, ["deepspeed.config=zero2", "train.precision=fp32", "train.gradient_checkpointing=true"]),
    "workers": (True, ["deepspeed.config=zero2", "train.precision=fp32", "train.num_workers=2"]),
}
RECIPE = """\
model: {{name_or_path: {model}}}
data: {{path: {data}, template: plain, max_length: 48}}
selection: {{num_clusters: 2, min_fraction: 0.5, tokens_per_batch: 256}}
train:
  epochs: 2
  global_batch_size: 8
  micro_batch_size: 2
  lr: 1e-3
  schedule: cosine
  warmup_ratio: 0.3
  gradient_checkpointing: false
  export_dtype: float32
  checkpoint_every: 100
  num_workers: 0
"""


def write_recipe(folder, tied):
    from cluster_ds.embedded import byte_tokenizer

    tokenizer = byte_tokenizer()
    model = folder / f"model_{tied}"
    tiny_llama(vocab_size=len(tokenizer), tie_word_embeddings=tied).save_pretrained(model)
    tokenizer.save_pretrained(model)
    data = folder / "data.jsonl"
    rows = [{"instruction": f"count to {i}", "response": " ".join(map(str, range(i % 9 + 1)))} for i in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / f"recipe_{tied}.yaml"
    path.write_text(RECIPE.format(model=model, data=data))
    return str(path)


def run_all(rank, world, folder, recipes):
    import gc

    import torch.distributed as dist

    from cluster_ds.distributed import Ranks
    from cluster_ds.prepare import prepare
    from cluster_ds.training import census, train

    ranks = Ranks(rank, world, rank, dist.distributed_c10d._get_default_store())
    lines = {}
    for name, (tied, overrides) in RUNS.items():
        recipe = load_recipe(recipes[tied], overrides)
        output = Path(folder, name)
        prepared = prepare(recipe, output, ranks)
        train(recipe, prepared, output, ranks)
        lines[name] = census(output, prepared.plan)
        gc.collect()
    return lines


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    recipes = {tied: write_recipe(folder, tied) for tied in (True, False)}
    lines = run_on_ranks(run_all, 2, str(folder), recipes)[0]
    return folder, lines


def reload(folder, name):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder / name / "model", output_loading_info=True)
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize("name", RUNS)
def test_export(runs, name):
    folder, lines = runs
    model = reload(folder, name)
    tied = RUNS[name][0]
    assert model.config.tie_word_embeddings == tied and model.dtype == torch.float32
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    start = dict(tiny_llama(vocab_size=model.config.vocab_size, tie_word_embeddings=tied).named_parameters())
    moved = torch.cat([(p - start[n]).flatten() for n, p in model.named_parameters()]).norm()
    assert torch.isfinite(moved) and moved > 1e-2
    assert len(lines[name]) == 2 and "each of" in lines[name][0]  # the census of both epochs


@pytest.mark.parametrize(
    ("name", "like", "tolerance"),
    [
        ("stage2", "stage0", 1e-5), ("stage3", "stage0", 1e-5), ("untied3", "untied2", 1e-5),
        ("checkpointing", "stage2", 1e-5), ("workers", "stage2", 0.0), ("bf16_3", "bf16_2", 0.05), ("bf16_1", "bf16_2", 0.05),
        ("bf16_0", "bf16_2", 0.05), ("bf16_2", "stage2", 0.2),
    ],
)
def test_settings_that_must_not_change_what_is_learnt(runs, name, like, tolerance):
    """Relative to the update; bf16's weights are exported after rounding, which the update of so few steps feels."""
    folder, _ = runs
    a, b = dict(reload(folder, name).named_parameters()), dict(reload(folder, like).named_parameters())
    start = dict(tiny_llama(vocab_size=a["model.embed_tokens.weight"].shape[0],
                            tie_word_embeddings=RUNS[name][0]).named_parameters())  # fmt: skip
    difference = torch.cat([(a[n] - b[n]).flatten() for n in b]).norm()
    update = torch.cat([(b[n] - start[n]).flatten() for n in b]).norm()
    assert difference <= tolerance * update, float(difference / update)


def test_learning_rates_follow_the_formula(runs):
    """Cosine with a warm-up of ceil(.3 x steps), as transformers counts it: the first step has rate 0."""
    import math

    entries = [json.loads(line) for line in (runs[0] / "stage2" / "log.jsonl").read_text().splitlines()]
    steps = len(entries)
    warmup = math.ceil(0.3 * steps)
    for i, entry in enumerate(entries):
        progress = (i - warmup) / (steps - warmup)
        expected = 1e-3 * (i / warmup if i < warmup else 0.5 * (1 + math.cos(math.pi * progress)))
        assert entry["lr"] == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert entry["grad_norm"] > 0 and len(entry["cluster_loss"]) == 2 and entry["data_wait_s"] >= 0
