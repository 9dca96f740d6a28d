"""What the paper's tables and figures show, for a run of yours: `python -m cluster_ds.analysis NAME RUN`.

Numbers go to RUN/analysis/NAME.json, the picture beside them as SVG. `cost` and `sensitivity` read a folder of
launch/compare.py, all others one of launch/train.py (or of one of a comparison's runs that has its own plan).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..arguments import positive
from ..messages import show_table
from . import batch_variance, compared, describing, gradients, selectors, semantic
from .runs import Output, Run, read_run

NAMES = {
    "diversity": "gradient diversity of each way to choose (Tables 8, 13)",
    "centroids": "what choosing does to the clusters' centroids (Table 10)",
    "composition": "samples, tokens and losses by cluster and source (Table 11)",
    "worker_cosine": "likeness of the ranks' gradients over training (Figure 6a)",
    "projection": "proxies in a plane, by cluster and by kept (Figure 6b)",
    "gradients": "true gradients inside and across clusters, with a permutation test (Figure 6c)",
    "variance": "variance of batches, predicted and measured (Figure 2, the propositions)",
    "semantic": "a sheet to label, or with --sheet its agreement with the clusters (Table 16)",
    "cost": "passes and seconds of every selection of a comparison (Tables 1, 4)",
    "sensitivity": "losses over a comparison's sweep (Figure 5, Table 14)",
}

_MOST_SHOWN = 20  # values of a list
_OF_COMPARISONS = {"cost": compared.analyse_cost, "sensitivity": compared.analyse_sensitivity}


def analyse(name: str, run: Run, args: argparse.Namespace) -> dict[str, Any] | None:
    """The numbers of an analysis; None where it leaves a sheet."""
    if name == "diversity":
        return selectors.analyse_diversity(run, args.seed, args.true, args.sketch)
    if name == "centroids":
        return selectors.analyse_centroids(run, args.seed)
    if name == "composition":
        return describing.analyse_composition(run)
    if name == "worker_cosine":
        return describing.analyse_worker_cosine(run)
    if name == "projection":
        return describing.analyse_projection(run, args.seed)
    if name == "gradients":
        return gradients.analyse(run, args.samples or 120, args.seed, args.sketch)
    if name == "variance":
        return batch_variance.analyse(run, args.batches)
    if args.sheet is not None:
        return semantic.read_sheet(run, args.sheet, args.seed)
    print(f"label the samples of {semantic.write_sheet(run, args.samples or 400, args.seed)}, then give it with --sheet")
    return None


def _rows(numbers: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Names and values for people; long lists are in the file alone."""
    if isinstance(numbers, dict):
        for key, value in numbers.items():
            yield from _rows(value, f"{name}.{key}" if name else str(key))
    elif isinstance(numbers, list) and any(isinstance(value, dict | list) for value in numbers):
        for i, value in enumerate(numbers[:_MOST_SHOWN]):
            yield from _rows(value, f"{name}.{i}")
    elif isinstance(numbers, list):
        if len(numbers) <= _MOST_SHOWN:
            yield name, ", ".join(map(_text, numbers))
    else:
        yield name, _text(numbers)


def _text(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def main() -> None:
    """The command line."""
    listed = "\n".join(f"  {name:14} {what}" for name, what in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="python -m cluster_ds.analysis", description=f"{__doc__}\n{listed}", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("run", type=Path, help="folder of a run, or of a comparison")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=positive, help="gradients: 120, semantic: 400")
    parser.add_argument("--sketch", type=positive, default=gradients.SKETCH, help="numbers of a gradient's sketch")
    parser.add_argument("--true", type=int, default=0, metavar="N", help="diversity: of N true gradients a selector too")
    parser.add_argument("--batches", type=positive, default=4000, help="variance: drawn for each quota")
    parser.add_argument("--sheet", type=Path, help="semantic: a labelled sheet")
    args = parser.parse_args()
    try:
        run: Output
        if args.name in _OF_COMPARISONS:
            run = Output(args.run.expanduser().resolve())
            numbers: dict[str, Any] | None = _OF_COMPARISONS[args.name](run)
        else:
            run = read_run(args.run)
            numbers = analyse(args.name, run, args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if numbers is not None:
        show_table(NAMES[args.name], list(_rows(numbers)))
        print(f"written to {run.folder / 'analysis'}: {args.name}.json, {args.name}.svg")


if __name__ == "__main__":
    main()
