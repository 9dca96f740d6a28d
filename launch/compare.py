"""Train all arms of a comparison at equal budget: `deepspeed launch/compare.py --recipe NAME --arms random,cluster`.

The same command again continues. Under `python` alone it is one rank. comparison.md, comparison.html and results.jsonl lie
in the output folder. With --keep_models `bash eval/humaneval.sh FOLDER/model` scores a run's model, and the same command
again, with nothing left to train, puts the scores into the tables.
"""

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.baselines.s2l import small_recipe
from cluster_ds.comparison.arms import ARMS, arms_of
from cluster_ds.comparison.running import MATCHES, Comparison, Point, compare, require_comparable
from cluster_ds.comparison.tables import write_tables
from cluster_ds.distributed import Ranks
from cluster_ds.preflight import require_ready
from cluster_ds.prepare import cache_dir
from cluster_ds.recipe import Recipe
from cluster_ds.recipe_file import load_recipe
from cluster_ds.runs import launch, open_run

FIXED = {
    *(f"selection.{name}" for name in ("choice", "balance", "quota", "weighting", "redraw", "trim", "dedup", "seed")),
    "train.seed", "train.allocation",
}


def points_of(args: argparse.Namespace, cache: Path) -> list[Point]:
    """The recipe at every combination of the sweeps' values."""
    axes = []
    for sweep in args.sweep:
        key, equals, values = sweep.partition("=")
        if not equals or not values:
            raise ValueError(f"--sweep {sweep}: expected section.key=value,value,..., e.g. selection.ratio=1,.75,.5")
        if key in FIXED:
            raise ValueError(f"--sweep {key}: the arms or --seeds decide that; name arms ({', '.join(ARMS)})")
        axes.append([f"{key}={value}" for value in values.split(",")])
    common = [*args.overrides, f"data.cache_dir={cache}"]
    common += [f"deepspeed.config={args.deepspeed_config}"] if args.deepspeed_config else []
    common += [f"selection.keep={args.keep}"] if args.keep is not None else []
    return [Point(", ".join(values), load_recipe(args.recipe, [*common, *values])) for values in itertools.product(*axes)]


def seeds_of(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(seed) for seed in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers, e.g. 0,1,2") from None


def recipes_needed(recipe: Recipe, arms: list[str]) -> list[Recipe]:
    """The recipe, and what arms train or read besides, whose models and data must be here as well."""
    needed = [recipe]
    if "s2l" in arms:
        needed.append(small_recipe(recipe))
    if "less" in arms and recipe.baselines.less.validation:
        rows = {"held_out": None, "held_out_sources": recipe.baselines.less.validation}
        needed.append(recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update=rows)}))
    return needed


def is_changed(recipe: Recipe, name: str) -> bool:
    """Whether a recipe sets a key to something else than its default."""
    section, _, key = name.partition(".")
    values = getattr(recipe, section)
    return getattr(values, key) != type(values).model_fields[key].default


def run(recipe: Recipe, output_dir: Path, ranks: Ranks, args: argparse.Namespace) -> None:
    if args.output_dir is None:
        output_dir = output_dir.with_name(f"{output_dir.name}_compare")
    points = points_of(args, cache_dir(recipe, output_dir))
    comparison = Comparison(points, arms_of(args.arms), args.seeds, args.match, args.keep_models)
    require_comparable(comparison)
    for point in points:
        for needed in recipes_needed(point.recipe, comparison.arms):
            ranks.on_main(lambda recipe=needed: require_ready(recipe, output_dir, ranks.world_size))
        changed = [name for name in sorted(FIXED) if is_changed(point.recipe, name)]
        if changed:
            ranks.print(f"[compare] {', '.join(changed)} of the recipe are not used: the arms and --seeds decide them")
    open_run(points[0].recipe, output_dir, ranks)
    ranks.print(
        f"[compare] {len(comparison.arms)} arms x {len(args.seeds)} seeds x {len(points)} points: {comparison.num_runs} runs"
    )
    compare(comparison, output_dir, ranks, lambda: write_tables(output_dir))
    ranks.on_main(lambda: write_tables(output_dir))
    ranks.print(f"[compare] {output_dir / 'comparison.md'} and comparison.html hold the tables")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--arms", default="random,cluster", help=f"all, or of {', '.join(ARMS)}; default: random,cluster")
    parser.add_argument("--keep", type=float, metavar="SHARE", help="of the samples; default: the recipe's budget")
    parser.add_argument("--seeds", type=seeds_of, default=[0, 1, 2], metavar="N,N", help="default: 0,1,2")
    parser.add_argument("--match", choices=MATCHES, default="samples", help="what the arms have equal; default: samples")
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=V,V", help="e.g. selection.ratio=1,.75,.5")
    parser.add_argument("--keep_models", action="store_true", help="for benchmarks; else they are deleted once judged")
    launch(parser, run)
