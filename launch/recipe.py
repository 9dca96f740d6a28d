"""Recipes: `python launch/recipe.py fetch NAME` brings all that a run reads; `check NAME` says what is missing here."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.preflight import fetch, inventory, look
from cluster_ds.recipe import add_override_argument, load_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("fetch", "download model, data and evaluation sets into the ordinary caches, for nodes without network"),
        ("check", "list what a run needs and what of it is missing; nothing is downloaded"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("recipe", metavar="NAME|PATH")
        add_override_argument(command)
        command.add_argument("--output_dir", type=Path, default=Path("runs"), help="where runs will be written")
    args = parser.parse_args()
    try:
        recipe = load_recipe(args.recipe, args.overrides)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    items = (fetch if args.command == "fetch" else look)(recipe, args.output_dir.resolve())
    print(*inventory(items), sep="\n")
    missing = sum(item.problem is not None for item in items)
    if missing:
        print(f"error: {missing} of {len(items)} items are missing", file=sys.stderr)
        sys.exit(1)
    print("everything is here" + ("; jobs may run with HF_HUB_OFFLINE=1" if args.command == "fetch" else ""))


if __name__ == "__main__":
    main()
