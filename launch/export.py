"""The rows that a plan keeps, for another trainer: `python launch/export.py runs/quickstart --to jsonl`.

jsonl, parquet: original columns, with sample_id, cluster, weight and distance. indices: row numbers for
datasets.Dataset.select. llamafactory: a data file and its entry in dataset_info.json. docs/export.md says how axolotl,
ms-swift, TRL and LLaMA-Factory read them.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.kept_rows import TARGETS, kept_rows, weights_note
from cluster_ds.plan import Plan
from cluster_ds.recipe_file import load_recipe


def export(args: argparse.Namespace) -> None:
    folder = args.plan / "plan" if (args.plan / "plan").is_dir() else args.plan
    plan, recipe = Plan.read(folder), args.recipe or folder.resolve().parent / "recipe.yaml"
    if args.recipe is None and not recipe.is_file():
        raise ValueError(f"{recipe} is not there: give the recipe that the plan was made with, --recipe NAME|PATH")
    kept = kept_rows(load_recipe(str(recipe)), plan)
    write, name, reads_weights = TARGETS[args.to]
    target = args.output or folder.resolve().parent / "export" / name
    wants_file = "." in name
    if target.is_dir() if wants_file else target.is_file():
        raise ValueError(f"--output {target} is a {'folder' if wants_file else 'file'}: {args.to} is written to the other")
    target.parent.mkdir(parents=True, exist_ok=True)
    files = write(kept, target)
    print(f"{len(kept.records)} of {len(plan)} rows written", *files, *kept.notes, sep="\n")
    note = weights_note(kept, reads_weights)
    if note:
        print(note, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a run's folder, or its plan/")
    parser.add_argument("--to", choices=TARGETS, required=True)
    parser.add_argument("--output", type=Path, metavar="PATH", help="default: export/ beside the plan")
    parser.add_argument("--recipe", metavar="NAME|PATH", help="default: recipe.yaml beside the plan")
    try:
        export(parser.parse_args())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
