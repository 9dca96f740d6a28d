"""Make the plan alone: `deepspeed launch/preprocess.py --recipe NAME`, or with plain `python` as one process."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.distributed import Ranks
from cluster_ds.files import write_text
from cluster_ds.preflight import require_ready
from cluster_ds.prepare import prepare, prepare_tokens
from cluster_ds.recipe import Recipe
from cluster_ds.report.selection import write_selection_report
from cluster_ds.runs import launch, open_run, report


def run(recipe: Recipe, output_dir: Path, ranks: Ranks, args: argparse.Namespace) -> None:
    open_run(recipe, output_dir, ranks)
    if args.preview:  # nothing but tokens, so no model is loaded
        prepare_tokens(recipe, output_dir, ranks, preview=args.preview)
        return
    ranks.on_main(lambda: require_ready(recipe, output_dir, ranks.world_size, training=False))
    prepared = prepare(recipe, output_dir, ranks)
    ranks.on_main(lambda: write_text(output_dir / "recipe.yaml", recipe.to_yaml()))
    world_size = ranks.world_size if ranks.world_size > 1 else recipe.hardware.ranks  # of the training to come
    report(lambda: write_selection_report(recipe, prepared, output_dir, world_size), ranks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--preview", type=int, default=0, metavar="N", help="print N samples with their supervised tokens marked, and stop"
    )
    launch(parser, run)
