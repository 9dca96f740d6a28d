"""MedQA, MedMCQA, PubMedQA and the medical subjects of MMLU, with lm-evaluation-harness as the engine.

Rows come from the hub's cache or from local JSONL files through the product's own readers; the tasks are eval/tasks/*.yaml.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from ..files import read_json, write_text
from ..memory import is_out_of_memory
from ..messages import Progress, quiet_libraries
from ..models import load_tokenizer, model_hash, text_config
from ..sources import BadRow, read_rows
from ..tokens import tokenizer_hash
from .results import print_results, require_same, share, write_results
from .workers import run_parallel

TASKS_DIR = Path(__file__).resolve().parent.parent.parent / "eval" / "tasks"
MMLU_SUBJECTS = (
    "anatomy", "clinical_knowledge", "college_biology", "college_medicine", "medical_genetics", "professional_medicine",
)
TASKS = ("medqa", "medmcqa", "pubmedqa", *(f"mmlu_{subject}" for subject in MMLU_SUBJECTS))
SETTINGS = "settings.json"
# task -> hub data set, its subset, and the split that is evaluated
_HUB: dict[str, tuple[str, str | None, str]] = {
    "medqa": ("GBaker/MedQA-USMLE-4-options-hf", None, "test"),
    "medmcqa": ("openlifescienceai/medmcqa", None, "validation"),
    "pubmedqa": ("qiaojin/PubMedQA", "pqa_labeled", "train"),
    **{f"mmlu_{subject}": ("cais/mmlu", subject, "test") for subject in MMLU_SUBJECTS},
}
_FIELDS = {
    "medqa": ("sent1", "ending0", "ending1", "ending2", "ending3", "label"),
    "medmcqa": ("question", "opa", "opb", "opc", "opd", "cop"),
    "pubmedqa": ("PMID", "QUESTION", "CONTEXTS", "final_decision"),
    "mmlu": ("question", "choices", "answer"),
}
_IDS = ("id", "PMID", "pubid")
_CHUNK = 64  # questions of one piece of work


@dataclass(frozen=True)
class MedicalConfig:
    """How the questions are scored.

    Attributes:
        tasks: of TASKS.
        data_dir: folder of local JSONL files; None is the hub's cache.
        limit: the first questions of each task alone.
        max_length: tokens of the window; None is the model's own. Longer prompts lose their beginning, and are counted.
        batch_size: prompts of one forward pass.
        dtype: of the weights; "auto" is the one they are stored in.
        num_workers: processes; None is one for each visible GPU, or one on the CPU.
    """

    tasks: tuple[str, ...] = TASKS
    data_dir: str | None = None
    limit: int | None = None
    max_length: int | None = None
    batch_size: int = 16
    dtype: str = "auto"
    num_workers: int | None = None


def choose_tasks(names: list[str]) -> tuple[str, ...]:
    """Tasks by name; "mmlu" is its six subjects.

    Raises:
        ValueError: for an unknown one, naming the known.
    """
    chosen: list[str] = []
    for name in names:
        found = [task for task in TASKS if task == name or (name == "mmlu" and task.startswith("mmlu_"))]
        if not found:
            raise ValueError(f"no task {name!r}: {', '.join(TASKS)}, or mmlu for its six subjects")
        chosen += [task for task in found if task not in chosen]
    return tuple(chosen)


def hub_sources(tasks: Sequence[str] = TASKS) -> list[tuple[str, str | None, str]]:
    """(data set, subset, split) of the tasks on the hub."""
    return list(dict.fromkeys(_HUB[task] for task in tasks))


def evaluate_medical(model: Path, config: MedicalConfig, output_dir: Path) -> dict[str, Any]:
    """Score a model on the tasks; a finished task is not scored again.

    Args:
        model: its folder.
        config: what and how.
        output_dir: for TASK.jsonl (every question's log-likelihoods) and results.json.
    Returns:
        what results.json holds.
    """
    started = time.perf_counter()
    questions = {task: load_questions(task, config.data_dir)[: config.limit] for task in config.tasks}
    window = config.max_length or _window(model)
    settings = {
        **{k: v for k, v in asdict(config).items() if k not in ("num_workers", "tasks")}, "max_length": window,
        "model_hash": model_hash(model), "tokenizer_hash": tokenizer_hash(load_tokenizer(model)),
    }
    output_dir.mkdir(parents=True, exist_ok=True)
    require_same(output_dir / SETTINGS, settings, started=any(output_dir.glob("*.jsonl")))
    done = {task: _read_answers(output_dir / f"{task}.jsonl", len(rows)) for task, rows in questions.items()}
    pieces = [
        (task, first, questions[task][first : first + _CHUNK])
        for task in config.tasks if done[task] is None for first in range(0, len(questions[task]), _CHUNK)
    ]  # fmt: skip
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    progress = Progress("eval", sum(len(rows) for _, _, rows in pieces), "questions")
    for task, first, answers in run_parallel(_score, (str(model), window, config), pieces, config.num_workers):
        progress.add(len(answers))
        found.setdefault(task, {})[first] = answers
        if sum(map(len, found[task].values())) == len(questions[task]):
            whole = [answer for _, piece in sorted(found.pop(task).items()) for answer in piece]
            write_text(output_dir / f"{task}.jsonl", "".join(json.dumps(answer) + "\n" for answer in whole))
            done[task] = whole
            right = sum(answer["right"] for answer in whole)
            progress.print(f"[eval] {task}: {right} of {len(whole)} right")
    answers = {task: done[task] or [] for task in config.tasks}
    result: dict[str, Any] = {
        "benchmark": "medqa", "label": "medical multiple choice, log-likelihood of the answer's letter or word, zero-shot",
        "scores": scores_of(answers), "engine": "lm_eval", "template": None, "tasks": list(config.tasks), **settings,
        "seconds": {"scoring": time.perf_counter() - started},
    }
    result["truncated"] = {task: _truncated(rows) for task, rows in answers.items() if _truncated(rows)["number"]}
    result["notes"] = [
        f"{cut['number']} of {len(answers[task])} prompts of {task} exceed {window} tokens and lost their beginning "
        f"({', '.join(cut['ids'][:5])}{', ...' if cut['number'] > 5 else ''}): not comparable with a longer window"
        for task, cut in result["truncated"].items()
    ]
    result = write_results(output_dir, model, result)
    print_results(result, output_dir)
    return result


def scores_of(answers: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Accuracy of each task, of MMLU's subjects together, and the averages where there is more than one benchmark."""
    rows = {task: (sum(a["right"] for a in found), len(found)) for task, found in answers.items()}
    scores: dict[str, Any] = {task: share(*rows[task]) for task in rows}
    groups: dict[str, list[tuple[int, int]]] = {}
    for task, row in rows.items():
        groups.setdefault("mmlu (medical subjects)" if task.startswith("mmlu_") else task, []).append(row)
    sums = {name: (sum(r for r, _ in group), sum(n for _, n in group)) for name, group in groups.items()}
    scores.update({name: share(*both) for name, both in sums.items()})
    if len(sums) > 1:
        n = sum(n for _, n in sums.values())
        scores["all questions"] = share(sum(r for r, _ in sums.values()), n)
        shares = [right / number for right, number in sums.values()]
        mean = sum(shares) / len(shares)
        variance = sum(p * (1 - p) / number for p, (_, number) in zip(shares, sums.values(), strict=True))
        error = math.sqrt(variance) / len(shares)
        scores[f"mean of {len(sums)} benchmarks"] = {
            "value": mean, "n": n, "interval_95": [max(0.0, mean - 1.96 * error), min(1.0, mean + 1.96 * error)],
        }
    return scores


def load_questions(task: str, data_dir: str | None) -> list[dict[str, Any]]:
    """The questions of a task with the fields that its YAML reads, and an `id`.

    Raises:
        ValueError: if they are not here, or a row lacks a field, naming the place.
    """
    kind = "mmlu" if task.startswith("mmlu_") else task
    if data_dir is None:
        source, subset, split = _HUB[task]
        rows, _ = read_rows(source, split=split, subset=subset)
    else:
        source = str(_local_file(kind, Path(data_dir).expanduser()))
        rows, _ = read_rows(source)
    questions = []
    for number, row in enumerate(rows):
        if isinstance(row.value, BadRow) or not isinstance(row.value, dict):
            raise ValueError(f"{source} {row.place}: {row.value if isinstance(row.value, BadRow) else 'not an object'}")
        try:
            fields = _as_lm_eval(task, row.value)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{source} {row.place}: {error}") from None
        if fields is None:
            continue
        missing = [name for name in _FIELDS[kind] if fields.get(name) is None]
        if missing:
            raise ValueError(f"{source} {row.place}: no {', '.join(missing)}: the fields are {', '.join(_FIELDS[kind])}")
        name = next((str(fields[k]) for k in _IDS if fields.get(k) is not None), str(number))
        questions.append({"id": name, **{field: fields[field] for field in _FIELDS[kind]}})
    if kind == "pubmedqa":
        questions = _official(questions, source)
    if not questions:
        raise ValueError(f"{source} holds no question of {task}")
    return questions


def _as_lm_eval(task: str, row: dict[str, Any]) -> dict[str, Any] | None:
    """A row with lm-eval's field names and Python's numbers; None if it is of another subject."""
    fields = dict(row)
    if task.startswith("mmlu_") and "subject" in row and row["subject"] != task.removeprefix("mmlu_"):
        return None
    if task == "pubmedqa":
        context = row.get("context") or {}
        fields = {
            "PMID": row.get("PMID", row.get("pubid", row.get("id"))), "QUESTION": row.get("QUESTION", row.get("question")),
            "CONTEXTS": row.get("CONTEXTS", context.get("contexts")), "final_decision": row.get("final_decision"),
        }
        fields["PMID"] = str(fields["PMID"]) if fields["PMID"] is not None else None
    if task == "pubmedqa":
        if fields["final_decision"] not in ("yes", "no", "maybe"):
            raise ValueError(f"final_decision is {fields['final_decision']!r}: yes, no or maybe")
        return fields
    name = {"medqa": "label", "medmcqa": "cop"}.get(task, "answer")
    text = str(fields.get(name))
    if text not in ("0", "1", "2", "3"):
        raise ValueError(f"{name} is {text}: the right choice is counted from 0 to 3")
    fields[name] = int(text)
    return fields


def _local_file(kind: str, folder: Path) -> Path:
    found = sorted(path for path in folder.glob(f"{kind}*") if path.is_file())
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(f"--data_dir {folder} must hold one file {kind}*.jsonl, it holds {names}")
    return found[0]


def _official(questions: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """PubMedQA's official test questions among those of the source, in the official order.

    A source that holds none of them is a set of one's own and stays as it is.
    """
    ids = read_json(TASKS_DIR / "pubmedqa_test_ids.json")["ids"]
    by_id = {question["PMID"]: question for question in questions}
    chosen = [by_id[i] for i in ids if i in by_id]
    if chosen and len(chosen) != len(ids):
        raise ValueError(f"{source} holds {len(chosen)} of PubMedQA's {len(ids)} official test questions: it is not whole")
    return chosen or questions


def _window(model: Path) -> int:
    return int(getattr(text_config(model), "max_position_embeddings", 2048))


def _read_answers(path: Path, number: int) -> list[dict[str, Any]] | None:
    if not path.is_file():
        return None
    answers = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return answers if len(answers) == number else None


def _truncated(answers: list[dict[str, Any]]) -> dict[str, Any]:
    cut = [answer for answer in answers if answer["num_cut"]]
    return {"number": len(cut), "ids": [answer["id"] for answer in cut], "tokens": [answer["num_cut"] for answer in cut]}


def _task(name: str, questions: list[dict[str, Any]]) -> Any:
    """lm-eval's task over the given questions."""
    from datasets import Dataset, DatasetDict
    from lm_eval.api.task import ConfigurableTask

    subject = name.removeprefix("mmlu_")
    file = TASKS_DIR / f"{'mmlu' if name.startswith('mmlu_') else name}.yaml"
    text = file.read_text(encoding="utf-8").replace("{subject}", subject)
    config = yaml.safe_load(text.replace("{subject_words}", subject.replace("_", " ")))
    rows = DatasetDict({"test": Dataset.from_list(questions)})
    return ConfigurableTask(config={**config, "num_fewshot": 0, "custom_dataset": lambda **_: rows})


def _score(
    shared: tuple[str, int, MedicalConfig], pieces: Sequence[tuple[str, int, list[dict[str, Any]]]], device: torch.device
) -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """Answers to each piece's questions: log-likelihood of every choice, and whether the likeliest is right."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    quiet_libraries()
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    folder, window, config = shared
    lm = HFLM(
        pretrained=folder, tokenizer=load_tokenizer(Path(folder)), dtype=config.dtype, device=str(device),
        batch_size=config.batch_size, max_length=window,
    )
    for name, first, questions in pieces:
        try:
            tasks = {"tasks": {name: _task(name, questions)}, "groups": {}, "group_map": {}}
            with contextlib.redirect_stderr(io.StringIO()):  # three progress bars
                found = evaluate(lm, tasks, bootstrap_iters=0, log_samples=True, verbosity="ERROR")
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(
                f"out of memory: lower --batch_size from {config.batch_size}; finished tasks are kept ({error})"
            ) from None
        assert found is not None
        samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
        yield name, first, [_answer(lm, sample, window) for sample in samples]


def _answer(lm: Any, sample: dict[str, Any], window: int) -> dict[str, Any]:
    lengths = [len(lm._encode_pair(*pair)[0]) + len(lm._encode_pair(*pair)[1]) for pair in sample["arguments"]]
    likelihoods = [float(response[0]) for response in sample["filtered_resps"]]
    return {
        "id": sample["doc"]["id"], "right": bool(sample["acc"]), "log_likelihoods": likelihoods,
        "choice": max(range(len(likelihoods)), key=likelihoods.__getitem__), "num_tokens": max(lengths),
        "num_cut": max(0, max(lengths) - window - 1),
    }
