"""Stage 0a: the command-line arguments that launchers and evaluation scripts share."""

from __future__ import annotations

import argparse
from pathlib import Path

from .recipe import Recipe
from .recipe_file import available_recipes, load_recipe


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every launcher shares."""
    parser.add_argument("--recipe", required=True, metavar="NAME|PATH", help=f"one of {', '.join(available_recipes())}")
    add_override_argument(parser)
    parser.add_argument("--deepspeed_config", metavar="FILE", help="replaces deepspeed.config of the recipe")
    parser.add_argument("--output_dir", type=Path, help="default: runs/<recipe name>")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # passed by the deepspeed launcher
    parser.add_argument("--stop_file", help=argparse.SUPPRESS)  # passed by launch/job.sh


def add_override_argument(parser: argparse.ArgumentParser) -> None:
    """`--set`, as often as wanted."""
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="e.g. selection.ratio=0.5"
    )


def positive(text: str) -> int:
    """A command line's whole number above 0."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def recipe_from_args(args: argparse.Namespace) -> tuple[Recipe, Path]:
    """The recipe and the run's folder that the arguments of `add_recipe_arguments` ask for."""
    overrides = list(args.overrides)
    if args.deepspeed_config:
        overrides.append(f"deepspeed.config={args.deepspeed_config}")
    recipe = load_recipe(args.recipe, overrides)
    return recipe, (args.output_dir or Path("runs") / recipe.name).expanduser().resolve()
