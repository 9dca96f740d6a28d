"""Recipes: what there is, what one says, whether it can run, and a copy to change.

python launch/recipe.py ls | show NAME | check NAME | check --all | fetch NAME | copy NAME FOLDER
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.arguments import add_override_argument, positive
from cluster_ds.catalogue import checked, copy_recipe, device_note, list_recipes
from cluster_ds.recipe import Recipe
from cluster_ds.recipe_file import available_recipes, find_recipe, load_recipe


def show(args: argparse.Namespace) -> None:
    print(load_recipe(args.recipe, args.overrides).to_yaml(), end="")


def check(args: argparse.Namespace) -> None:
    """With --all the recipes themselves; a single one also against this machine."""
    from cluster_ds.preflight import fetch_benchmarks, look, missing_for  # torch and transformers: `ls` needs none

    if args.all == (args.recipe is not None):
        raise ValueError("give a recipe's name, or --all")
    if args.all:
        problems = 0
        for name in available_recipes():
            try:
                print(*checked(find_recipe(name), load_recipe(name)), sep="\n")
            except ValueError as error:
                problems += 1
                print(f"{name}: {error}", file=sys.stderr)
        if problems:
            raise ValueError(f"{problems} of {len(available_recipes())} recipes are not right")
        print(f"{len(available_recipes())} recipes are right")
        return
    recipe = load_recipe(args.recipe, args.overrides)
    ranks = args.ranks or recipe.hardware.ranks
    if args.before_job:
        print(*device_note(recipe, ranks), sep="\n", end="")
        missing_for(recipe, args.output_dir or Path("runs") / recipe.name, ranks)
        for warning in fetch_benchmarks(recipe):  # small, and better known now than after the training
            print(f"warning: {warning}; the evaluation after the training will stop there", file=sys.stderr)
        return
    print(*checked(find_recipe(args.recipe), recipe, ranks), sep="\n")
    _report(recipe, look(recipe, _folder(args), ranks), "everything is here")


def fetch_all(args: argparse.Namespace) -> None:
    from cluster_ds.preflight import fetch

    recipe = load_recipe(args.recipe, args.overrides)
    _report(recipe, fetch(recipe, _folder(args)), "everything is here; jobs may run with HF_HUB_OFFLINE=1")


def copy(args: argparse.Namespace) -> None:
    print(*copy_recipe(args.recipe, args.target), sep="\n")


def _folder(args: argparse.Namespace) -> Path:
    return (args.output_dir or Path("runs")).resolve()


def _report(recipe: Recipe, items: list, good: str) -> None:
    from cluster_ds.preflight import inventory

    print(*inventory(items), sep="\n")
    missing = sum(item.problem is not None for item in items)
    if missing:
        print(f"error: {missing} of {len(items)} items are missing", file=sys.stderr)
        sys.exit(1)
    print(good)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, work, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, allow_abbrev=False)
        added.set_defaults(work=work)
        return added

    command("ls", lambda args: list_recipes(), "the shipped recipes: model, data, GPUs, ZeRO, steps")
    one = command("show", show, "a recipe with all its defaults")
    one.add_argument("recipe", metavar="NAME|PATH")
    add_override_argument(one)
    one = command("check", check, "types, files, rules, batch arithmetic, memory; and what is missing on this machine")
    one.add_argument("recipe", nargs="?", metavar="NAME|PATH")
    one.add_argument("--all", action="store_true", help="all shipped recipes, without this machine")
    one.add_argument("--ranks", type=positive, metavar="W", help="default: the recipe's own number of GPUs")
    one.add_argument("--before_job", action="store_true", help=argparse.SUPPRESS)  # by launch/job.sh: what cannot be fetched
    add_override_argument(one)
    one.add_argument("--output_dir", type=Path, help="where runs will be written")
    one.add_argument("--deepspeed_config", metavar="FILE", help="replaces deepspeed.config of the recipe")
    one = command("fetch", fetch_all, "download all that a run and its evaluation read, for nodes without network")
    one.add_argument("recipe", metavar="NAME|PATH")
    add_override_argument(one)
    one.add_argument("--output_dir", type=Path, help="where runs will be written")
    one = command("copy", copy, "a recipe's YAML and job script into another folder, ready to be changed")
    one.add_argument("recipe", metavar="NAME|PATH")
    one.add_argument("target", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if getattr(args, "deepspeed_config", None):
        args.overrides.append(f"deepspeed.config={args.deepspeed_config}")
    try:
        args.work(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
