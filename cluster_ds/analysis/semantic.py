"""Table 16: a sheet of samples for a person to label, and how well the clusters agree with the labels.

The sheet does not show clusters. Read back, the share of samples whose label is the commonest of their cluster is the
paper's agreement; since any labels agree somewhat with any clusters, the share that is expected when the labels are dealt
anew is given beside it, with a permutation test, and scikit-learn's adjusted mutual information.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import adjusted_mutual_info_score

from .runs import Run

_COLUMNS = ("sample_id", "label", "prompt", "answer")
_SHOWN_TOKENS = 400
_PERMUTATIONS = 9_999


def write_sheet(run: Run, num_samples: int, seed: int) -> Path:
    """Write `analysis/semantic.csv`, samples drawn at random from all that are in a cluster.

    Raises:
        ValueError: if a sheet is there: labels are never overwritten.
    """
    path = run.folder / "analysis" / "semantic.csv"
    if path.exists():
        raise ValueError(f"{path} is there already: fill its column 'label' and read it back, or move it away")
    path.parent.mkdir(exist_ok=True)
    rows = np.sort(np.random.default_rng((seed, 10)).permutation(run.usable)[:num_samples])
    tokens, tokenizer = run.samples.tokens, run.samples.tokenizer
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for row in rows:
            sample = tokens[int(row)]
            first = int(np.argmax(sample["labels"] >= 0))
            parts = (sample["input_ids"][:first], sample["input_ids"][first:])
            texts = [tokenizer.decode(part[:_SHOWN_TOKENS], skip_special_tokens=True) for part in parts]
            writer.writerow([run.plan.ids[row], "", *texts])
    return path


def read_sheet(run: Run, sheet: Path, seed: int) -> dict[str, Any]:
    """Agreement of a labelled sheet with the clusters.

    Raises:
        ValueError: for a sheet without labels, or of other samples.
    """
    with sheet.open(newline="", encoding="utf-8") as file:
        entries = [(row["sample_id"], row["label"].strip()) for row in csv.DictReader(file)]
    place = {name: row for row, name in enumerate(run.plan.ids)}
    strangers = [name for name, _ in entries if name not in place]
    if strangers:
        raise ValueError(f"{sheet}: {len(strangers)} of {len(entries)} samples are not in {run.folder}, e.g. {strangers[0]}")
    labelled = [(place[name], label) for name, label in entries if label]
    if not labelled:
        raise ValueError(f"{sheet}: none of {len(entries)} samples has a label in its column 'label'")
    clusters = run.plan.cluster[[row for row, _ in labelled]]
    names, labels = np.unique([label for _, label in labelled], return_inverse=True)
    found, rng = agreement(clusters, labels), np.random.default_rng((seed, 11))
    dealt = np.array([agreement(clusters, rng.permutation(labels)) for _ in range(_PERMUTATIONS)])
    dominant = {
        int(c): {"label": str(names[np.bincount(labels[clusters == c]).argmax()]), "samples": int((clusters == c).sum()),
                 "agree": int(np.bincount(labels[clusters == c]).max())}
        for c in np.unique(clusters)
    }
    numbers = {
        "num_labelled": len(labelled), "num_unlabelled": len(entries) - len(labelled), "clusters": dominant,
        "agreement": found, "expected_by_chance": float(dealt.mean()),
        "p_value": float((1 + (dealt >= found - 1e-12).sum()) / (1 + len(dealt))),
        "adjusted_mutual_information": float(adjusted_mutual_info_score(labels, clusters)),
    }
    run.save("semantic", numbers)
    with run.picture("semantic") as figure:
        axes = figure.subplots()
        left = np.zeros(len(dominant))
        for number, name in enumerate(names):
            counts = np.array([(labels[clusters == c] == number).sum() for c in dominant])
            axes.barh([f"cluster {c}" for c in dominant], counts, left=left, label=str(name))
            left += counts
        axes.set(xlabel="samples", title=f"agreement {found:.1%}, by chance {numbers['expected_by_chance']:.1%}")
        axes.legend(fontsize=8)
    return numbers


def agreement(clusters: np.ndarray, labels: np.ndarray) -> float:
    """Share of the samples whose label, int [n], is the commonest of their cluster, int [n]."""
    return sum(int(np.bincount(labels[clusters == c]).max()) for c in np.unique(clusters)) / len(labels)
