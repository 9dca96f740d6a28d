"""S and X cases that train: real ranks, a small model, every id and weight compared."""

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cluster_ds.recipe_file import load_recipe

from ..conftest import tiny_llama
from ..distributed.ranks import run_on_ranks
from .support import INPUTS

pytestmark = pytest.mark.distributed
RECIPE = """\
model: {{name_or_path: {model}}}
data: {{path: {data}, template: plain, max_length: 96}}
selection: {{num_clusters: 1, tokens_per_batch: 512}}
train:
  epochs: {epochs}
  global_batch_size: 8
  micro_batch_size: 2
  lr: 1e-3
  precision: fp32
  gradient_checkpointing: false
  export_dtype: float32
  checkpoint_every: {every}
  keep_checkpoints: 20
  num_workers: 0
deepspeed: {{config: zero2}}
"""


def write_recipe(folder: Path, *, epochs: int, every: int, tied: bool = True) -> str:
    from cluster_ds.embedded import byte_tokenizer

    model = folder / f"model_{tied}"
    tiny_llama(vocab_size=259, tie_word_embeddings=tied).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    path = folder / f"recipe_{epochs}_{tied}.yaml"
    path.write_text(RECIPE.format(model=model, data=INPUTS / "s02_21rows.jsonl", epochs=epochs, every=every))
    return str(path)


def run(rank, world, jobs):
    """Jobs one after the other: (recipe, overrides, output, output that is copied as it was after a step, step[, --resume])."""
    import torch.distributed as dist

    from cluster_ds.distributed import Ranks
    from cluster_ds.prepare import prepare
    from cluster_ds.run_log import census
    from cluster_ds.training import train

    ranks = Ranks(rank, world, rank, dist.distributed_c10d._get_default_store())
    out = []
    for path, overrides, output, origin, step, *resume in jobs:
        recipe, output = load_recipe(path, overrides), Path(output)
        if origin is not None:
            ranks.on_main(lambda o=Path(origin), n=output, s=step: as_it_was(o, n, s))
        try:
            prepared = prepare(recipe, output, ranks)
            result = train(recipe, prepared, output, ranks, *resume)
            out.append(ranks.on_main(lambda o=output, p=prepared, r=result: census(o, p.plan, r.num_steps)))
        except ValueError as error:
            out.append(str(error))
        except Exception as error:  # the other ranks' report
            out.append(type(error).__name__)
    return out


def as_it_was(origin, output, step):
    """A copy of a run as a kill after `step` steps would have left it."""
    shutil.copytree(origin, output)
    shutil.rmtree(output / "model")
    for path in sorted((output / "checkpoints").glob("step-*"))[step:]:
        shutil.rmtree(path)


def entries(output, name="census"):
    return [json.loads(line) for line in (Path(output) / f"{name}.jsonl").read_text().splitlines()]


def weights(output):
    from safetensors.torch import load_file

    return load_file(Path(output) / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Whole runs, and runs that go on from the middle: unchanged, with another micro batch, global batch and seed."""
    folder = tmp_path_factory.mktemp("resumed")
    three, two = write_recipe(folder, epochs=3, every=1), write_recipe(folder, epochs=2, every=1)
    runs = {name: str(folder / "runs" / name) for name in ("three", "three_on", "two", "micro", "batch", "seed")}
    jobs = [
        (three, [], runs["three"], None, 0), (three, [], runs["three_on"], runs["three"], 5),
        (two, [], runs["two"], None, 0), (two, ["train.micro_batch_size=4"], runs["micro"], runs["two"], 2),
        (two, ["train.global_batch_size=16"], runs["batch"], runs["two"], 2),
        (two, ["train.seed=1"], runs["seed"], runs["two"], 2),
    ]  # fmt: skip
    with redirect_output(folder / "printed"):
        results = run_on_ranks(run, 2, jobs)[0]
    return runs, dict(zip(runs, results, strict=True)), (folder / "printed").read_text()


@contextmanager
def redirect_output(path):
    """File descriptor 1 of this process, and so of the ranks that it starts, to a file."""
    before = os.dup(1)
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(before, 1)
            os.close(before)


def same_order(a, b):
    return [x["rows"] for x in entries(a)] == [x["rows"] for x in entries(b)] and [x["lr"] for x in entries(a, "log")] == [
        x["lr"] for x in entries(b, "log")
    ]


def test_S01_resume_inside_a_later_epoch(resumed):
    runs, _, printed = resumed
    assert same_order(runs["three"], runs["three_on"]) and "resuming behind step 5" in printed
    assert all(torch.equal(weights(runs["three"])[n], w) for n, w in weights(runs["three_on"]).items())
    epochs = [[x["rows"] for x in entries(runs["three_on"])[i : i + 3]] for i in (0, 3, 6)]
    assert all(sorted(row for rows in epoch for row in rows) == list(range(21)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]  # each step's rows are sorted, so the sets differ


def test_S04_another_micro_batch_on_resume(resumed):
    runs, results, printed = resumed
    assert len(entries(runs["micro"])) == 6 and same_order(runs["two"], runs["micro"])
    assert "now 2 ranks x 4 samples x 1 micro-batches = 8 a step; the global batches stay the same" in printed
    assert all(torch.allclose(weights(runs["two"])[n], w, atol=1e-5) for n, w in weights(runs["micro"]).items())
    assert "global_batch_size: then 8, now 16" in results["batch"] and "seed: then 0, now 1" in results["seed"]


def test_S02_padding_is_no_data(tmp_path):
    recipe = write_recipe(tmp_path, epochs=1, every=3)
    last = {}
    for world in (1, 2, 4):
        output = str(tmp_path / "runs" / str(world))
        (line,) = run_on_ranks(run, world, [(recipe, [], output, None, 0)])[0][0]
        assert line.startswith("epoch 1: each of 21 kept samples once")
        log = entries(output, "log")
        assert [x["num_samples"] for x in log] == [8, 8, 5] and [x["weight_sum"] for x in log] == [8, 8, 5]
        last[world] = log[-1]
    for world in (2, 4):  # the denominator is 5 everywhere, so loss and gradient are the same
        for key in ("loss", "grad_norm"):
            assert last[world][key] == pytest.approx(last[1][key], rel=1e-6)


def logits_before_export(rank, world, folder, recipes):
    """Train and export at each stage; the engine's own logits on three prompts, before saving."""
    import torch.distributed as dist

    import cluster_ds.training as training
    from cluster_ds.checkpoint import checkpoint_bytes
    from cluster_ds.distributed import Ranks
    from cluster_ds.prepare import prepare

    ranks = Ranks(rank, world, rank, dist.distributed_c10d._get_default_store())
    kept = {}
    export = training.export_model
    for name, (path, overrides) in recipes.items():

        def spy(engine, *rest, name=name):
            model = engine.engine.module.eval()
            with torch.no_grad():
                kept[name] = [model(torch.tensor([prompt]), use_cache=False).logits for prompt in PROMPTS]
            kept[f"{name} bytes"] = checkpoint_bytes(engine)
            export(engine, *rest)

        training.export_model = spy
        recipe, output = load_recipe(path, overrides), Path(folder, name)
        training.train(recipe, prepare(recipe, output, ranks), output, ranks)
    return kept


PROMPTS = ([5, 6, 7], [10, 250, 30, 4], [100])


def test_X01_tied_embeddings_stay_tied(tmp_path):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    tied, untied = (write_recipe(tmp_path, epochs=1, every=3, tied=t) for t in (True, False))
    recipes = {"tied3": (tied, ["deepspeed.config=zero3"])}  # first: zero.Init wants a process without another engine
    recipes |= {f"tied{stage}": (tied, [f"deepspeed.config=zero{stage}"]) for stage in (0, 2)}
    bf16 = ["train.precision=bf16", "train.export_dtype=bfloat16", "deepspeed.config=zero2"]
    recipes |= {"untied2": (untied, []), "bf16": (tied, bf16)}
    kept = run_on_ranks(logits_before_export, 2, str(tmp_path / "runs"), recipes)[0]
    torch.set_num_threads(1)  # as the ranks: sums are split by threads
    tensors = {}
    for name in recipes:
        folder = tmp_path / "runs" / name / "model"
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert shared == model.config.tie_word_embeddings == (name != "untied2")
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert ("lm_head.weight" in file.keys()) == (name == "untied2")  # noqa: SIM118
        with torch.no_grad():
            for prompt, logits in zip(PROMPTS, kept[name], strict=True):
                found = model.eval()(torch.tensor([prompt]), use_cache=False).logits
                # One token's products round by where in memory the weights lie, which in an engine is a flat buffer.
                torch.testing.assert_close(found, logits, rtol=0, atol=1e-6)
        tensors[name] = model.state_dict()
        files = (tmp_path / "runs" / name / "checkpoints" / "step-00000003").rglob("*.pt")
        assert 0.9 < sum(f.stat().st_size for f in files) / kept[f"{name} bytes"] < 1.25  # names and random states on top
    for name in ("tied2", "tied3"):
        for key, value in tensors["tied0"].items():
            assert torch.allclose(tensors[name][key], value, atol=1e-6)


def test_X03_resume_finds_nothing(tmp_path, capfd):
    """(a) nothing there, (b) the newest cut by a byte, (c) all of them cut; then back to an older one by its name.

    (d), a name that is not there, is among the bad inputs.
    """
    recipe = write_recipe(tmp_path, epochs=3, every=3)
    a, b, c = (str(tmp_path / "runs" / n) for n in "abc")
    assert run_on_ranks(run, 2, [(recipe, [], a, None, 0)])
    assert "no checkpoint, starting at step 0" in capfd.readouterr().out

    def cut(output, steps):
        as_it_was(Path(a), Path(output), 2)
        for step in steps:
            file = max((Path(output) / "checkpoints" / f"step-{step:08d}").glob("*.pt"))
            file.write_bytes(file.read_bytes()[:-1])

    cut(b, [6])
    cut(c, [3, 6])
    before = {p: p.stat().st_size for p in Path(c).rglob("*")}
    results = run_on_ranks(run, 2, [(recipe, [], b, None, 0), (recipe, [], c, None, 0)])[0]
    printed = capfd.readouterr().out
    assert "checkpoint step-00000006 passed over" in printed and "bytes instead of" in printed
    assert "resuming behind step 3" in printed
    assert all(torch.equal(weights(a)[n], w) for n, w in weights(b).items())
    assert results[1].startswith("no whole checkpoint to resume from; nothing was changed") and "step-00000003" in results[1]
    assert {p: p.stat().st_size for p in Path(c).rglob("*")} == before
    first = weights(a)
    assert run_on_ranks(run, 2, [(recipe, [], a, None, 0, "step-00000003")])
    assert "resuming behind step 3" in capfd.readouterr().out
    assert all(torch.equal(first[n], w) for n, w in weights(a).items())
    names = {p.name for p in (Path(a) / "checkpoints").iterdir() if p.is_dir()}
    assert names == {"step-00000003", "step-00000006", "step-00000009", "set-aside-step-00000006", "set-aside-step-00000009"}
