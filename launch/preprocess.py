"""Make the plan alone: `deepspeed launch/preprocess.py --recipe NAME`, or with plain `python` as one process."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.distributed import Ranks
from cluster_ds.files import write_text
from cluster_ds.prepare import prepare
from cluster_ds.recipe import Recipe
from cluster_ds.runs import launch, open_run


def run(recipe: Recipe, output_dir: Path, ranks: Ranks) -> None:
    open_run(recipe, output_dir, ranks)
    prepare(recipe, output_dir, ranks)
    ranks.on_main(lambda: write_text(output_dir / "recipe.yaml", recipe.to_yaml()))


if __name__ == "__main__":
    launch(argparse.ArgumentParser(description=__doc__), run)
