"""Make the plan alone: `deepspeed launch/preprocess.py --recipe NAME`, or with plain `python` as one process."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.distributed import ranks_of_job
from cluster_ds.prepare import prepare
from cluster_ds.recipe import add_recipe_arguments, recipe_from_args
from cluster_ds.runs import exit_with_message, open_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_recipe_arguments(parser)
    args = parser.parse_args()
    with exit_with_message():
        recipe, output_dir = recipe_from_args(args)
        with ranks_of_job() as ranks:
            open_run(recipe, output_dir, ranks)
            prepare(recipe, output_dir, ranks)


if __name__ == "__main__":
    main()
