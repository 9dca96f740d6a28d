"""Beside the stages: the shipped recipes as a list, what can be checked of one without running it, and copies."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from .ds_config import find_config, read_config, resolve_config, zero_stage
from .estimate import batch_text, memory_per_gpu, steps_text, total_bytes
from .files import write_text
from .messages import show_table
from .recipe import Recipe
from .recipe_file import RECIPES_DIR, available_recipes, find_recipe, load_recipe
from .shapes import DATASET_ROWS, SHAPES, ModelShape

_HOME = Path(__file__).resolve().parent.parent


def list_recipes() -> None:
    """Print the shipped recipes; steps are those of full data, where its size is known beforehand."""
    lines = []
    for name in available_recipes():
        recipe = load_recipe(name)
        train = recipe.train
        stage = zero_stage(read_config(find_config(recipe.deepspeed.config)))
        rows = sum(DATASET_ROWS.get(source.path, 0) for source in recipe.data.all_sources.values())
        steps = str(-(-rows // train.global_batch_size) * train.epochs) if rows else ""
        data = ", ".join(source.path for source in recipe.data.all_sources.values())
        kind = "CPU" if is_for_cpu(recipe) else "GPU"
        lines.append((
            name, recipe.model.name_or_path, data, f"{recipe.hardware.ranks} {kind}", f"{stage} ({recipe.deepspeed.config})",
            train.optimizer, steps,
        ))  # fmt: skip
    show_table("recipes", lines, ("recipe", "model", "data", "ranks", "ZeRO", "optimizer", "steps on full data"))


def is_for_cpu(recipe: Recipe) -> bool:
    """Whether the recipe is paired with the CPU's config."""
    return Path(recipe.deepspeed.config).stem == "cpu"


def checked(path: Path, recipe: Recipe, ranks: int | None = None) -> list[str]:
    """Check a recipe without running it.

    Args:
        path: of its YAML.
        recipe: as loaded, so its types are right.
        ranks: W; default the recipe's own.
    Returns:
        what was found, one line each.
    Raises:
        ValueError: for a missing or broken job script, a ZeRO rule, or batch sizes that do not divide.
    """
    ranks = ranks or recipe.hardware.ranks
    config = resolve_config(recipe.deepspeed.config, recipe.train, ranks)
    script = path.with_suffix(".sh")
    if path.parent == RECIPES_DIR and not script.is_file():
        raise ValueError(f"{path} has no job script {script.name} beside it")
    if script.is_file():
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{script} is no valid bash: {done.stderr.strip()}")
    lines = [
        f"{recipe.name}: {batch_text(recipe, ranks)}; ZeRO {zero_stage(config)} ({recipe.deepspeed.config}), "
        f"{recipe.train.precision}, {recipe.train.optimizer}; K = {recipe.selection.num_clusters}"
    ]
    rows = sum(DATASET_ROWS.get(source.path, 0) for source in recipe.data.all_sources.values())
    if rows:
        lines.append(f"  full data: {rows} rows, {steps_text(rows, recipe.train)}")
    shape = SHAPES.get(recipe.model.name_or_path)
    if shape is not None and not is_for_cpu(recipe):
        lines += [f"  {line}" for line in memory_lines(shape, recipe, ranks, detail=False)]
    return lines


def memory_lines(shape: ModelShape, recipe: Recipe, ranks: int, detail: bool = True) -> list[str]:
    """Memory of each GPU in training in words, with a warning where it does not fit."""
    config = resolve_config(recipe.deepspeed.config, recipe.train, ranks)
    needed = memory_per_gpu(
        shape, recipe.train, config, ranks, recipe.data.max_length, recipe.model, recipe.packing,
    )
    total, room = total_bytes(needed), recipe.hardware.gpu_memory_gb
    parts = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in needed.items() if value >= 5e7)
    lines = [f"memory of each of {ranks} GPUs, estimated: {total / 1e9:.0f} of {room:.0f} GB"]
    lines[0] += f" ({parts})" if detail else ""
    if total > room * 1e9:
        lower = f"lower {recipe.smaller_micro_batch}, " if recipe.smaller_micro_batch else ""
        lines.append(
            f"warning: {total / 1e9:.0f} GB do not fit into {room:.0f} GB ({parts}): {lower}take a higher ZeRO stage "
            "(deepspeed.config zero2, zero3, zero3_offload) or more GPUs, or say what yours have (hardware.gpu_memory_gb)"
        )
    return lines


def device_note(recipe: Recipe, ranks: int) -> list[str]:
    """What another number of devices than the recipe's changes; nothing for its own."""
    named = recipe.hardware.ranks
    if ranks == named:
        return []
    return [
        f"note: {ranks} devices where the recipe names {named}: {batch_text(recipe, ranks)} (with {named}: "
        f"{batch_text(recipe, named)}); the global batches stay the same\n"
    ]


def copy_recipe(name_or_path: str, target: Path) -> list[str]:
    """Copy a recipe's YAML and job script into a folder; the script then names both the YAML and this checkout.

    Returns:
        what was written and how to use it.
    Raises:
        ValueError: if a file is there already, or the recipe has no job script.
    """
    source = find_recipe(name_or_path)
    load_recipe(str(source))
    script = source.with_suffix(".sh")
    if not script.is_file():
        raise ValueError(f"{source} has no job script {script.name} beside it: copy the YAML alone and use launch/train.py")
    folder = target.expanduser().resolve()
    files = [folder / source.name, folder / script.name]
    there = [str(file) for file in files if file.exists()]
    if there:
        raise ValueError(f"{', '.join(there)} is there already: choose another folder")
    home = f'CLUSTER_DS_HOME="${{CLUSTER_DS_HOME:-{_inside(str(_HOME))}}}"'
    line = f"recipe={_quoted(str(files[0]))}\n{home}"
    text, found = re.subn(r"(?m)^recipe=.*$", lambda _: line, script.read_text(encoding="utf-8"), count=1)
    if not found:
        raise ValueError(f"{script} has no line that begins with recipe=: it is no job script of ours")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(files[0], source.read_text(encoding="utf-8"))
    write_text(files[1], text)
    files[1].chmod(0o755)
    return [*map(str, files), f"run it from any folder: bash {files[1]} --dry_run, then sbatch {files[1]}"]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _inside(text: str) -> str:
    """For ${NAME:-TEXT} within double quotes."""
    return re.sub(r'([\\"$`}])', r"\\\1", text)
