"""The benchmarks that a recipe names, on the model that its run has left: `python eval/run.py --recipe NAME`."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.arguments import add_recipe_arguments, recipe_from_args
from cluster_ds.evaluation.command import add_code_arguments, add_shared_arguments, refusing, run_code, run_medical
from cluster_ds.evaluation.results import resolve_model_folder


def run(args: argparse.Namespace) -> None:
    recipe, output_dir = recipe_from_args(args)
    if not recipe.evaluate.benchmarks:
        print(f"[eval] recipe {recipe.name} names no benchmarks (evaluate.benchmarks)")
        return
    model = resolve_model_folder(str(output_dir / "model"))
    args.template = args.template or recipe.data.template
    for benchmark in recipe.evaluate.benchmarks:
        print(f"[eval] {benchmark}", flush=True)
        if benchmark == "medqa":
            run_medical(args, model)
        else:
            run_code(args, benchmark, model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_recipe_arguments(parser)
    parser.add_argument("--data_dir", metavar="DIR", help="of the medical questions; see eval/medqa.sh --help")
    add_shared_arguments(parser)
    add_code_arguments(parser)
    args = parser.parse_args()
    refusing(lambda: run(args), args.verbose)
