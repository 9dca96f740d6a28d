"""prepare() and train() of a small recipe on two ranks: every precision, ZeRO stage and optimizer, exported and reloaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from cluster_ds.recipe_file import load_recipe
from cluster_ds.run_log import read_lines

from ..conftest import tiny_llama
from .ranks import run_on_ranks

pytestmark = pytest.mark.distributed

RUNS = {  # name: (tied embeddings, overrides); stage 3 first: zero.Init must not live on what another run initialised
    "stage3": (True, ["deepspeed.config=zero3", "train.precision=fp32"]),
    "stage0": (True, ["deepspeed.config=zero0", "train.precision=fp32"]),
    "stage2": (True, ["deepspeed.config=zero2", "train.precision=fp32"]),
    "untied2": (False, ["deepspeed.config=zero2", "train.precision=fp32"]),
    "untied3": (False, ["deepspeed.config=zero3", "train.precision=fp32"]),
    "bf16_0": (True, ["deepspeed.config=zero0"]),
    "bf16_1": (True, ["deepspeed.config=zero1"]),
    "bf16_2": (True, ["deepspeed.config=zero2"]),
    "bf16_3": (True, ["deepspeed.config=zero3"]),
    "offload": (True, ["deepspeed.config=zero3_offload"]),
    "autocast": (True, ["deepspeed.config=zero0", "train.precision=bf16_autocast", "train.optimizer=adafactor"]),
    "pure_bf16": (True, ["deepspeed.config=zero0", "train.precision=pure_bf16", "train.optimizer=adafactor"]),
    "checkpointing": (True, ["deepspeed.config=zero2", "train.precision=fp32", "train.gradient_checkpointing=true"]),
    "dropout": ("dropout", ["deepspeed.config=zero2", "train.precision=fp32"]),
    "packed": (True, ["deepspeed.config=zero2", "train.precision=fp32", "train.packing=true", "train.tokens_per_micro_batch=64"]),
    "packed_bf16_3": (True, ["deepspeed.config=zero3", "train.packing=true", "train.gradient_checkpointing=true"]),
    "lora": (True, ["deepspeed.config=zero2", "train.precision=fp32", "model.lora.rank=4", "train.lr=1e-2"]),
    "lora_bf16_3": (True, ["deepspeed.config=zero3", "model.lora.rank=4", "train.lr=1e-2", "train.packing=true"]),
    "looked_at": (
        True,
        ["deepspeed.config=zero2", "train.precision=fp32", "train.diagnose_every=2", "evaluate.every=2", "train.log_to=[tensorboard, csv]"],
    ),
    "looked_at_3": (True, ["deepspeed.config=zero3", "train.precision=fp32", "train.diagnose_every=2", "evaluate.every=2"]),
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
  checkpoint_every: 3
  keep_checkpoints: 10
  num_workers: 0
evaluate: {{held_out: {data}, max_samples: 13}}
"""


def model_of(tied):
    """Tied, untied, or tied with dropout, whose random numbers a resumed run must draw again."""
    changes = {"attention_dropout": 0.3} if tied == "dropout" else {}
    return tiny_llama(vocab_size=259, tie_word_embeddings=bool(tied), **changes)


def write_recipe(folder, tied):
    from cluster_ds.embedded import byte_tokenizer

    tokenizer = byte_tokenizer()
    model = folder / f"model_{tied}"
    assert len(tokenizer) == 259
    made = model_of(tied)
    made.generation_config.eos_token_id = [2, 7]
    made.save_pretrained(model)
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
    from cluster_ds.prepare import prepare, prepare_tokens
    from cluster_ds.run_log import census
    from cluster_ds.runs import evaluate_held_out
    from cluster_ds.training import train

    ranks = Ranks(rank, world, rank, dist.distributed_c10d._get_default_store())
    lines = {}
    for name, (tied, overrides) in RUNS.items():
        recipe = load_recipe(recipes[tied], overrides)
        output = Path(folder, name)
        prepared = prepare(recipe, output, ranks)
        held_out = prepare_tokens(recipe, output, ranks, held_out=True) if recipe.evaluate.every else None
        result = train(recipe, prepared, output, ranks, held_out=held_out)
        if held_out is not None:
            lines["held out", name] = evaluate_held_out(recipe, held_out, result.model, output, ranks, label="after")
        lines[name] = ranks.on_main(lambda o=output, p=prepared, r=result: census(o, p.plan, r.num_steps))
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if torch.is_tensor(t)}
        lines[name].append(sum(held.values()))
        again = Path(folder, f"{name}_resumed")
        ranks.on_main(lambda o=output, a=again: forget_the_end(o, a))
        train(recipe, prepared, again, ranks, held_out=held_out)
    return lines


def forget_the_end(output, again):
    """A copy of the run as it was after step 3."""
    shutil.copytree(output, again)
    shutil.rmtree(again / "model")
    for path in sorted((again / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(path)
    assert (again / "checkpoints" / "step-00000003" / "manifest.json").is_file()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    recipes = {tied: write_recipe(folder, tied) for tied in (True, False, "dropout")}
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
    tied = bool(RUNS[name][0])
    assert model.generation_config.eos_token_id == [2, 7]
    assert model.config.tie_word_embeddings == tied and model.dtype == torch.float32
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    start = dict(model_of(tied).named_parameters())
    moved = torch.cat([(p - start[n]).flatten() for n, p in model.named_parameters()]).norm()
    assert torch.isfinite(moved) and moved > 1e-2
    *census_lines, held = lines[name]
    assert len(census_lines) == 2 and all("each of" in line for line in census_lines)
    assert held < 0.5 * sum(p.nbytes for p in model.parameters())  # engine and weights are gone after training


@pytest.mark.parametrize("name", RUNS)
def test_resumed_behind_step_3_ends_with_the_same_bits(runs, name):
    """Optimizer statistics in their own dtype, random numbers, schedule and position, for every kind of engine."""
    folder, _ = runs
    files = [folder / run / "model" / "model.safetensors" for run in (name, f"{name}_resumed")]
    assert files[0].read_bytes() == files[1].read_bytes()
    logs = [[json.loads(line) for line in (folder / run / "log.jsonl").read_text().splitlines()]
            for run in (name, f"{name}_resumed")]  # fmt: skip
    assert [(e["step"], e["loss"], e["lr"], e["grad_norm"]) for e in logs[0]] == [
        (e["step"], e["loss"], e["lr"], e["grad_norm"]) for e in logs[1]
    ]
    assert all(e["grad_norm"] > 0 for e in logs[0])


@pytest.mark.parametrize(
    ("name", "like", "tolerance"),
    [
        ("stage2", "stage0", 1e-5), ("stage3", "stage0", 1e-5), ("untied3", "untied2", 1e-5),
        ("checkpointing", "stage2", 1e-5), ("workers", "stage2", 0.0), ("looked_at", "stage2", 0.0), ("looked_at_3", "stage3", 0.0), ("packed", "stage2", 1e-5), ("bf16_3", "bf16_2", 0.05),
        ("packed_bf16_3", "bf16_3", 0.05), ("offload", "bf16_3", 0.05), ("bf16_1", "bf16_2", 0.05),
        ("bf16_0", "bf16_2", 0.05), ("bf16_2", "stage2", 0.2),
    ],
)
def test_settings_that_must_not_change_what_is_learnt(runs, name, like, tolerance):
    """Relative to the update; bf16's weights are exported after rounding, which the update of so few steps feels."""
    folder, _ = runs
    a, b = dict(reload(folder, name).named_parameters()), dict(reload(folder, like).named_parameters())
    start = dict(model_of(RUNS[name][0]).named_parameters())
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


def test_packs_and_skew_are_in_the_log(runs):
    entries = [json.loads(line) for line in (runs[0] / "packed" / "log.jsonl").read_text().splitlines()]
    padded = [json.loads(line) for line in (runs[0] / "stage2" / "log.jsonl").read_text().splitlines()]
    assert [e["num_tokens"] for e in entries] == [e["num_tokens"] for e in padded]
    assert {e["micro_steps"] for e in padded} == {2} and all(e["micro_steps"] >= 2 for e in entries)
    for entry in (*entries, *padded):
        assert 1.0 <= entry["skew"] <= 2.0
    tails = {e["step"]: 8 - e["num_samples"] for e in padded}
    assert {e["step"]: e["fillers"] for e in padded} == tails  # slots of a short last batch
    assert sum(e["fillers"] for e in entries) <= sum(tails.values())


@pytest.mark.parametrize("name", ["looked_at", "looked_at_3"])
def test_held_out_losses_are_those_of_the_exported_model(runs, name):
    """Measured in training on both ranks, and by the evaluation after it; a resumed run has seen each step once."""
    folder, lines = runs
    found = [read_lines(folder / run / "held_out.jsonl") for run in (name, f"{name}_resumed")]
    assert [e["step"] for e in found[0]] == [2, 4, 6] and [e["sample_mean"] for e in found[0]] == [e["sample_mean"] for e in found[1]]
    after = lines["held out", name]
    assert found[0][-1]["num_samples"] == 10 and found[0][0]["sample_mean"] != after["sample_mean"]
    for kind in ("sample_mean", "token_mean"):
        assert found[0][-1][kind] == pytest.approx(after[kind], rel=1e-6)
    diagnosed = [e for e in read_lines(folder / name / "log.jsonl") if "rank_cosine" in e]
    assert [e["step"] for e in diagnosed] == [2, 4, 6]
    assert all(-1 < e["rank_cosine"] < 1 and e["num_gradients"] == 4 and e["standard_error"] == 0 for e in diagnosed)


def test_monitors_are_told_what_the_log_says(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = runs
    entries = read_lines(folder / "looked_at" / "log.jsonl")
    (name,) = (p.name for p in (folder / "looked_at" / "tensorboard").iterdir())
    events = EventAccumulator(str(folder / "looked_at" / "tensorboard" / name))
    events.Reload()
    assert {"cluster_ds/loss", "cluster_ds/rank_cosine", "cluster_ds/held_out_sample_mean"} <= set(events.Tags()["scalars"])
    assert not any(tag.startswith("Train/") for tag in events.Tags()["scalars"])  # DeepSpeed's own, over another axis
    found = [(e.step, e.value) for e in events.Scalars("cluster_ds/loss")]
    assert found == [(e["step"], pytest.approx(e["loss"])) for e in entries]
    lines = (folder / "looked_at" / "csv" / name / "cluster_ds_loss.csv").read_text().split()
    assert [float(line.split(",")[1]) for line in lines[1:]] == pytest.approx([e["loss"] for e in entries])
    again = {p.name for p in (folder / "looked_at_resumed" / "tensorboard").iterdir()}
    assert again == {name, f"{name}-from-3"}  # the run that was copied, and its going on


def test_the_adapter_beside_the_merged_model_makes_it_of_the_base(runs):
    from peft import PeftModel

    folder, _ = runs
    model = PeftModel.from_pretrained(model_of(True), folder / "lora" / "model" / "adapter")
    ids = torch.arange(5, 40)[None]
    base, expected, merged = (m.eval()(input_ids=ids).logits for m in (model_of(True), model, reload(folder, "lora")))
    assert (merged - expected).abs().max() < 1e-5 < 1e-2 < (expected - base).abs().max()
    saved = torch.load(folder / "lora" / "checkpoints" / "step-00000006" / "mp_rank_00_model_states.pt", weights_only=False)
    own = [key for key in saved["module"] if ".lora_" not in key]
    assert len(saved["module"]) == 28 + 1 and own == ["base_model.model.lm_head.weight"]  # of the base only what is tied


def ends_early(rank, world, folder, recipe_file):
    """Held-out text that training leads away from; ended, started again, and once more without the exported model."""
    import torch.distributed as dist

    from cluster_ds.distributed import Ranks
    from cluster_ds.prepare import prepare, prepare_tokens
    from cluster_ds.run_log import census
    from cluster_ds.runs import evaluate_held_out
    from cluster_ds.training import train

    ranks = Ranks(rank, world, rank, dist.distributed_c10d._get_default_store())
    settings = ["deepspeed.config=zero3", "train.precision=fp32", "train.epochs=9", "train.lr=1e-2", "train.checkpoint_every=1"]
    other = Path(folder, "other.jsonl")
    rows = [{"instruction": f"count to {i}", "response": bytes(range(97 + i, 117 + i)).decode("latin-1")} for i in range(6)]
    ranks.on_main(lambda: other.write_text("".join(json.dumps(row) + "\n" for row in rows)))
    settings += [f"evaluate.held_out={other}", "train.keep_checkpoints=1", "evaluate.every=2", "evaluate.keep_best=true", "evaluate.patience=3"]
    recipe, output = load_recipe(recipe_file, settings), Path(folder, "early")
    prepared, held_out = prepare(recipe, output, ranks), prepare_tokens(recipe, output, ranks, held_out=True)
    out = {}
    for start in ("first", "again", "without the model"):
        result = train(recipe, prepared, output, ranks, held_out=held_out)
        out[start] = (result.num_steps, result.stopped_early, result.reused, (result.model / "model.safetensors").read_bytes())
        ranks.gather(True)
        if start == "again" and ranks.is_main:
            shutil.rmtree(result.model)
        ranks.gather(True)
    out["loss"] = evaluate_held_out(recipe, held_out, result.model, output, ranks, label="after")["sample_mean"]
    out["census"] = ranks.on_main(lambda: census(output, prepared.plan, result.num_steps, result.stopped_early))
    return out


def test_training_ends_early_and_exports_the_best_checkpoint(tmp_path):
    """Stage 3, whose engine must be built anew to load what it has saved itself."""
    found = run_on_ranks(ends_early, 2, str(tmp_path), write_recipe(tmp_path, True))[0]
    losses = {e["step"]: e["sample_mean"] for e in read_lines(tmp_path / "early" / "held_out.jsonl")}
    best, last = min(losses, key=losses.get), max(losses)
    assert last == best + 6 and last < 27  # three evaluations later
    steps, early, reused, model = found["first"]
    assert (steps, early, reused) == (last, True, False) and found["loss"] == pytest.approx(losses[best], rel=1e-6)
    assert found["again"] == (last, True, True, model) and found["without the model"] == (last, True, False, model)
    checkpoints = tmp_path / "early" / "checkpoints"
    assert sorted(p.name for p in checkpoints.glob("step-*")) == [f"step-{best:08d}", f"step-{last:08d}"]
    assert json.loads((checkpoints / "best.json").read_text())["checkpoint"] == f"step-{best:08d}"
    assert len(found["census"]) == -(-last // 3)


def compiled_and_not(rank, world, folder, recipe_file):
    import torch.distributed as dist

    from cluster_ds.distributed import Ranks
    from cluster_ds.prepare import prepare
    from cluster_ds.training import train

    ranks = Ranks(rank, world, rank, dist.distributed_c10d._get_default_store())
    compiled = ["train.compile=true", "train.gradient_checkpointing=true"]
    for name, stage, more in (("compiled3", 3, compiled), ("plain", 2, []), ("compiled2", 2, compiled)):
        settings = [f"deepspeed.config=zero{stage}", "train.precision=fp32", "train.packing=true", "train.epochs=1", *more]
        torch._dynamo.reset()  # several models in one process reach its limit of compiled versions, and the last ran as it is
        recipe, output = load_recipe(recipe_file, settings), Path(folder, name)
        train(recipe, prepare(recipe, output, ranks), output, ranks)


@pytest.mark.slow
def test_compiled_layers_learn_the_same(tmp_path):
    run_on_ranks(compiled_and_not, 2, str(tmp_path), write_recipe(tmp_path, True))
    plain, start = dict(reload(tmp_path, "plain").named_parameters()), dict(model_of(True).named_parameters())
    update = torch.cat([(plain[n] - start[n]).flatten() for n in plain]).norm()
    for name in ("compiled2", "compiled3"):
        found = dict(reload(tmp_path, name).named_parameters())
        difference = torch.cat([(found[n] - plain[n]).flatten() for n in plain]).norm()
        assert 0 < difference <= 1e-4 * update  # 0: nothing was compiled
