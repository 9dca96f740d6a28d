"""Fetched on a login node, copied to a node without hub access, run there; what is missing is named before anything runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .fake_hub import COMMIT, serve

ROOT = Path(__file__).resolve().parent.parent
RECIPE = """\
model: {name_or_path: acme/tiny, revision: main}
data: {path: acme/rows, template: plain, max_length: 320}
selection: {num_clusters: 2, min_fraction: 0.5, tokens_per_batch: 1024}
train: {epochs: 1, global_batch_size: 8, micro_batch_size: 4, lr: 1e-3, precision: fp32, num_workers: 0}
deepspeed: {config: cpu}
evaluate: {held_out: acme/rows, held_out_split: test}
"""
CARD = """\
---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test.jsonl
---
# Rows
"""


def command(script, *arguments, home, endpoint=None):
    """A launcher as a user of that HF_HOME would run it; without an endpoint the hub is switched off."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "DS_ACCELERATOR": "cpu"}
    environment |= {"HF_HUB_OFFLINE": "1"} if endpoint is None else {"HF_ENDPOINT": endpoint}
    return subprocess.run(
        [sys.executable, str(ROOT / "launch" / script), *arguments], capture_output=True, text=True, env=environment, timeout=300
    )


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    from cluster_ds.embedded import resolve_model

    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(resolve_model("embedded:tiny"), folder / "model")
    data = folder / "rows" / "data"
    data.mkdir(parents=True)
    (folder / "rows" / "README.md").write_text(CARD)
    for name, numbers in (("train-0", range(12)), ("train-1", range(12, 24)), ("test", range(24, 28)), ("notes", range(3))):
        rows = [{"instruction": f"Count to {i}.", "output": " ".join(map(str, range(i + 1)))} for i in numbers]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"models/acme/tiny": folder / "model", "datasets/acme/rows": folder / "rows"}


@pytest.fixture(scope="module")
def fetched(tmp_path_factory, repositories):
    """The recipe, and a hub cache that `fetch` has filled."""
    folder = tmp_path_factory.mktemp("login")
    (folder / "recipe.yaml").write_text(RECIPE)
    with serve(repositories) as (endpoint, _):
        done = command("recipe.py", "fetch", str(folder / "recipe.yaml"), home=folder / "home", endpoint=endpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"commit {COMMIT}" in done.stdout and "everything is here; jobs may run with HF_HUB_OFFLINE=1" in done.stdout
    assert "model.safetensors" in done.stdout and "data/train-1.jsonl" in done.stdout and "notes.jsonl" not in done.stdout
    return folder


def test_a_copy_runs_without_the_hub(fetched, tmp_path):
    shutil.copytree(fetched / "home", tmp_path / "home", symlinks=True)
    recipe = ("--recipe", str(fetched / "recipe.yaml"), "--output_dir", str(tmp_path / "run"))
    done = command("train.py", *recipe, home=tmp_path / "home")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[tokens] 24 samples" in done.stdout and "[held-out] 4 samples" in done.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["model.safetensors", "data/test.jsonl"])
def test_a_missing_file_is_named(fetched, tmp_path, name):
    shutil.copytree(fetched / "home", tmp_path / "home", symlinks=True)
    (path,) = (tmp_path / "home" / "hub").glob(f"*/snapshots/{COMMIT}/{name}")
    path.unlink()
    done = command("train.py", "--recipe", str(fetched / "recipe.yaml"), "--output_dir", str(tmp_path / "run"), home=tmp_path / "home")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "cannot run here" in done.stderr and name in done.stderr and "launch/recipe.py fetch" in done.stderr
    assert not (tmp_path / "run").exists()
    if name == "model.safetensors":
        checked = command("recipe.py", "check", str(fetched / "recipe.yaml"), home=tmp_path / "home")
        assert checked.returncode == 1 and name in checked.stdout


def test_what_the_hub_refuses(repositories, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = str(tmp_path / "recipe.yaml")
    with serve(repositories, gated=("models/acme/tiny",)) as (endpoint, _):
        done = command("recipe.py", "fetch", recipe, home=tmp_path / "home", endpoint=endpoint)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert f"model 'acme/tiny' at revision 'main' is gated: accept its licence at {endpoint}/acme/tiny" in done.stdout
        wrong = ("--set", "model.revision=v9", "--set", "data.path=acme/nothing")
        done = command("recipe.py", "fetch", recipe, *wrong, home=tmp_path / "home", endpoint=endpoint)
        assert "model 'acme/tiny' at revision 'v9': the hub has no such revision" in done.stdout
        assert "data set 'acme/nothing' is neither here nor on the hub" in done.stdout and "Traceback" not in done.stderr


def test_benchmark_data_and_the_sandbox_are_looked_for(tmp_path, monkeypatch):
    from cluster_ds.preflight import look
    from cluster_ds.recipe_file import load_recipe

    (tmp_path / "evalplus").mkdir()
    (tmp_path / "evalplus" / "HumanEvalPlus-v0.1.10.jsonl").write_text("{}\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MBPP_OVERRIDE_PATH", str(tmp_path / "own.jsonl"))
    recipe = load_recipe("tiny", ["evaluate.benchmarks=[humaneval, mbpp]"])
    problems = {item.name: item.problem for item in look(recipe, tmp_path / "run")}
    assert problems["benchmark data HumanEvalPlus-v0.1.10.jsonl"] is None
    assert f"{tmp_path / 'own.jsonl'} is not there" in problems["benchmark data MbppPlus-v0.2.0.jsonl"]
    assert problems["sandbox for generated code"] is None and problems["packages of the evaluation"] is None
    monkeypatch.setattr("cluster_ds.evaluation.sandbox._JAIL", tmp_path / "nothing.py")
    problems = {item.name: item.problem for item in look(recipe, tmp_path / "run")}
    assert "no sandbox for generated code here" in problems["sandbox for generated code"]


MEDICAL_CARD = """\
---
configs:
- config_name: {name}
  data_files:
  - split: {split}
    path: {folder}/{split}-*
---
"""
READ = """
import sys
sys.path.insert(0, {root!r})
from cluster_ds.evaluation.medical import TASKS, load_questions
for task in TASKS:
    questions = load_questions(task, None)
    print(task, len(questions), questions[0]["id"], sorted(questions[0]))
"""


def test_medical_questions_come_from_the_hubs_cache(tmp_path, repositories):
    """Sets in the hub's layouts (parquet by subset, jsonl named by split), fetched by the recipe, read without the hub."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from cluster_ds.evaluation.medical import MMLU_SUBJECTS, TASKS_DIR

    ids = json.loads((TASKS_DIR / "pubmedqa_test_ids.json").read_text())["ids"]
    hub = {}

    def repository(name, card, files):
        folder = tmp_path / "hub" / name.replace("/", "_")
        for path, rows in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if path.endswith(".parquet"):
                pq.write_table(pa.Table.from_pylist(rows), folder / path)
            else:
                (folder / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "README.md").write_text(card)
        hub[f"datasets/{name}"] = folder

    four = {f"ending{i}": "x" for i in range(4)}
    medqa = [{"id": f"t{i}", "sent1": "?", "sent2": "", **four, "label": i} for i in range(3)]
    repository("GBaker/MedQA-USMLE-4-options-hf", "# none", {"test.json": medqa, "train.json": medqa * 2, "dev.json": medqa[:1]})
    medmcqa = [{"id": "a", "question": "?", "opa": "1", "opb": "2", "opc": "3", "opd": "4", "cop": 2}]
    card = MEDICAL_CARD.format(name="default", split="validation", folder="data")
    repository("openlifescienceai/medmcqa", card, {"data/validation-0.parquet": medmcqa, "data/train-0.parquet": medmcqa * 4})
    labeled = [
        {"pubid": int(i), "question": "?", "context": {"contexts": ["c"], "labels": ["L"]}, "final_decision": "no"} for i in ["7", *ids]
    ]
    card = MEDICAL_CARD.format(name="pqa_labeled", split="train", folder="pqa_labeled")
    repository("qiaojin/PubMedQA", card, {"pqa_labeled/train-0.parquet": labeled})
    configs = "".join(
        f"- config_name: {s}\n  data_files:\n  - split: test\n    path: {s}/test-*\n" for s in [*MMLU_SUBJECTS, "astronomy"]
    )
    mmlu = [{"question": "?", "subject": "s", "choices": ["1", "2", "3", "4"], "answer": 3}]
    rows = {f"{s}/test-0.parquet": [{**mmlu[0], "subject": s}] * 2 for s in [*MMLU_SUBJECTS, "astronomy"]}
    repository("cais/mmlu", f"---\nconfigs:\n{configs}---\n", rows)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("evaluate: {", "evaluate: {benchmarks: [medqa], "))
    with serve({**repositories, **hub}) as (address, requests):
        done = command("recipe.py", "fetch", str(recipe), home=tmp_path / "home", endpoint=address)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not any("astronomy" in r for r in requests if r.startswith("GET datasets"))
    done = subprocess.run(
        [sys.executable, "-c", READ.format(root=str(ROOT))], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
    )
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines[:4]] == [
        ["medqa", "3", "t0"], ["medmcqa", "1", "a"], ["pubmedqa", "500", ids[0]], ["mmlu_anatomy", "2", "0"],
    ], done.stderr[-2000:]
    assert len(lines) == 9


def test_a_disk_that_is_too_small_is_missing_as_well(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    import cluster_ds.files as files
    import cluster_ds.preflight as preflight
    from cluster_ds.embedded import resolve_model
    from cluster_ds.recipe_file import load_recipe

    usage = files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    recipe = load_recipe("tiny", [f"model.name_or_path={resolve_model('embedded:tiny')}"])
    problem = {item.name: item.problem for item in preflight.look(recipe, tmp_path / "run")}["disk space"]
    number = AutoModelForCausalLM.from_pretrained(resolve_model("embedded:tiny")).num_parameters()
    needed = number * (2 + 4 + 8 + 2)  # bf16, fp32 master and two moments in a checkpoint, bf16 in the export
    assert f"one checkpoint and the exported model needs about {needed / 1e6:.1f} MB in" in problem
    assert "1.0 MB are free there" in problem
