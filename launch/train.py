"""Select, train, export: `deepspeed launch/train.py --recipe NAME`. The same command again continues or reuses."""

import argparse
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.arguments import positive
from cluster_ds.checkpoint import find_checkpoint
from cluster_ds.distributed import Ranks
from cluster_ds.dry_run import dry_run
from cluster_ds.preflight import require_ready
from cluster_ds.prepare import prepare
from cluster_ds.recipe import Recipe
from cluster_ds.report import try_page
from cluster_ds.report.selection import write_selection_report
from cluster_ds.report.training import write_training_report
from cluster_ds.run_log import census
from cluster_ds.runs import evaluate_held_out, held_out_tokens, launch, open_run, print_summary, report
from cluster_ds.training import NotFiniteError, train
from cluster_ds.watch import Stopped


def run(recipe: Recipe, output_dir: Path, ranks: Ranks, args: argparse.Namespace) -> None:
    started = time.perf_counter()
    if args.dry_run:
        # Under a launcher its ranks; alone, what the recipe is written for.
        world_size = args.ranks or (ranks.world_size if ranks.world_size > 1 or args.probe else recipe.hardware.ranks)
        dry_run(recipe, output_dir, ranks, world_size, num_probe_steps=args.probe, price=args.price_per_gpu_hour)
        return
    if args.probe or args.price_per_gpu_hour is not None or args.ranks:
        raise ValueError("--probe, --price_per_gpu_hour and --ranks belong to --dry_run")
    ranks.on_main(lambda: require_ready(recipe, output_dir, ranks.world_size))  # refuses before any time is spent
    open_run(recipe, output_dir, ranks)
    if args.resume:
        ranks.on_main(lambda: find_checkpoint(output_dir / "checkpoints", args.resume))  # refuses what is not there
    prepared = prepare(recipe, output_dir, ranks)
    report(lambda: write_selection_report(recipe, prepared, output_dir, ranks.world_size), ranks)
    held_out = held_out_tokens(recipe, output_dir, ranks)
    before = evaluate_held_out(recipe, held_out, prepared.model_folder, output_dir, ranks, label="before")
    page = partial(write_training_report, recipe, prepared.plan, prepared.model_folder, output_dir)
    try:
        result = train(recipe, prepared, output_dir, ranks, args.resume, held_out)
    except (Stopped, NotFiniteError) as end:  # on all ranks alike, and where curves are wanted most
        if isinstance(end, Stopped):
            ranks.watch.stop_in_order()  # whoever asked is answered, and a second signal ends nothing
        reason = "stopped, the same command continues" if isinstance(end, Stopped) else str(end)

        def write() -> str:
            with suppress(OSError):
                return try_page(lambda: page(cut_short=reason))
            return "[report] the disk is full: no page on the training"

        ranks.print(ranks.on_main(write))
        raise
    after = evaluate_held_out(recipe, held_out, result.model, output_dir, ranks, label="after")
    lines = ranks.on_main(lambda: census(output_dir, prepared.plan, result.num_steps, result.stopped_early))
    ranks.print(*(f"[census] {line}" for line in lines))
    print_summary(recipe, prepared, result, before, after, output_dir, ranks, time.perf_counter() - started)
    report(page, ranks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--resume", metavar="NAME|PATH", help="of a checkpoint, e.g. step-00000050; default: the newest")
    parser.add_argument("--dry_run", action="store_true", help="say what the run would do and need, then stop")
    parser.add_argument("--probe", type=positive, default=0, metavar="N", help="with --dry_run: time N steps, predict hours")
    parser.add_argument("--price_per_gpu_hour", type=float, metavar="P", help="with --probe: predict the cost as well")
    parser.add_argument("--ranks", type=positive, metavar="W", help="of the dry run; default: this job's, or the recipe's")
    launch(parser, run)
