"""Log-likelihoods of the medical questions' choices by transformers alone: no lm-eval, no padding, no code of the product.

    python tests/medical_oracle.py MODEL DATA_DIR LIMIT EVALUATION_FOLDER

compares a finished evaluation (eval/medqa.sh ... --limit LIMIT --dtype float32 --output_dir EVALUATION_FOLDER) question by
question. In bfloat16 a batch's padding alone moves log-likelihoods by some tenths, so compare in float32.
"""

import json
import sys
from pathlib import Path

import torch

SUBJECTS = (
    "anatomy", "clinical_knowledge", "college_biology", "college_medicine", "medical_genetics", "professional_medicine",
)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(folder: Path, limit: int) -> dict[str, list[tuple[str, list[str], int]]]:
    """Task -> (prompt, choices, number of the right one)."""
    letters = [" A", " B", " C", " D"]
    medqa = [
        (f"Question: {r['sent1']}\nA. {r['ending0']}\nB. {r['ending1']}\nC. {r['ending2']}\nD. {r['ending3']}\nAnswer:", letters, r["label"])
        for r in rows(folder / "medqa_4options_test.jsonl")[:limit]
    ]
    medmcqa = [
        (f"Question: {r['question']}\nChoices:\nA. {r['opa']}\nB. {r['opb']}\nC. {r['opc']}\nD. {r['opd']}\nAnswer:", letters, r["cop"])
        for r in rows(folder / "medmcqa_dev_single_2816.jsonl")[:limit]
    ]
    by_id = {r["PMID"]: r for r in rows(folder / "pubmedqa_test.jsonl")}
    ids = list(json.loads((folder / "test_ground_truth.json").read_text()))[:limit]
    pubmedqa = [
        (
            "Abstract: " + "\n".join(by_id[i]["CONTEXTS"]) + f"\nQuestion: {by_id[i]['QUESTION']}\nAnswer:",
            [" yes", " no", " maybe"], ["yes", "no", "maybe"].index(by_id[i]["final_decision"]),
        )
        for i in ids
    ]
    found = {"medqa": medqa, "medmcqa": medmcqa, "pubmedqa": pubmedqa}
    for subject in SUBJECTS:
        words = subject.replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {words}.\n\n"
        found[f"mmlu_{subject}"] = [
            (head + f"{r['question'].strip()}\n" + "".join(f"{k}. {c}\n" for k, c in zip("ABCD", r["choices"], strict=True)) + "Answer:", letters, r["answer"])
            for r in rows(folder / "mmlu_med_test.jsonl") if r["subject"] == subject
        ][:limit]
    return found


@torch.no_grad()
def log_likelihoods(model_folder: Path, data: Path, limit: int) -> dict[str, list[tuple[list[float], int]]]:
    """Task -> (log-likelihood of each choice given the prompt, number of the right one)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    out: dict[str, list[tuple[list[float], int]]] = {}
    for task, found in questions(data, limit).items():
        for prompt, choices, right in found:
            values, last, logits = [], None, torch.empty(0)
            for choice in choices:
                whole = tokenizer(prompt + choice)["input_ids"]
                first = len(tokenizer(prompt)["input_ids"])
                if whole[:-1] != last:  # choices of one token share the prompt
                    last, logits = whole[:-1], model(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)
                values.append(sum(float(logits[i - 1, whole[i]]) for i in range(first, len(whole))))
            out.setdefault(task, []).append((values, right))
    return out


if __name__ == "__main__":
    folder = Path(sys.argv[4])
    expected = log_likelihoods(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    scores = json.loads((folder / "results.json").read_text())["scores"]
    for task, found in expected.items():
        ours = rows(folder / f"{task}.jsonl")
        worst = max(abs(a - b) for o, (v, _) in zip(ours, found, strict=True) for a, b in zip(o["log_likelihoods"], v, strict=True))
        choice = [max(range(len(v)), key=v.__getitem__) for v, _ in found]
        same = sum(o["choice"] == c for o, c in zip(ours, choice, strict=True))
        right = sum(c == r for c, (_, r) in zip(choice, found, strict=True))
        print(f"{task}: log-likelihoods differ by {worst:.4f} at most; {same} of {len(found)} choices equal; "
              f"{right} right by plain transformers, {scores[task]['right']} in results.json")
