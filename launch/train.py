"""Select, train, export: `deepspeed launch/train.py --recipe NAME`. The same command again continues or reuses."""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.distributed import Ranks
from cluster_ds.ds_config import resolve_config
from cluster_ds.prepare import prepare
from cluster_ds.recipe import Recipe
from cluster_ds.runs import evaluate_held_out, held_out_tokens, launch, open_run, print_summary
from cluster_ds.training import census, train


def run(recipe: Recipe, output_dir: Path, ranks: Ranks, args: argparse.Namespace) -> None:
    started = time.perf_counter()
    # Refuses before any time is spent.
    ranks.on_main(lambda: resolve_config(recipe.deepspeed.config, recipe.train, ranks.world_size))
    open_run(recipe, output_dir, ranks)
    prepared = prepare(recipe, output_dir, ranks)
    held_out = held_out_tokens(recipe, output_dir, ranks)
    before = evaluate_held_out(recipe, held_out, prepared.model_folder, output_dir, ranks, label="before")
    result = train(recipe, prepared, output_dir, ranks)
    after = evaluate_held_out(recipe, held_out, result.model, output_dir, ranks, label="after")
    lines = ranks.on_main(lambda: census(output_dir, prepared.plan, result.num_steps))
    ranks.print(*(f"[census] {line}" for line in lines))
    print_summary(recipe, prepared, result, before, after, output_dir, ranks, time.perf_counter() - started)


if __name__ == "__main__":
    launch(argparse.ArgumentParser(description=__doc__), run)
