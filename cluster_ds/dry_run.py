"""Before a run: what it would do, need and cost. Without a probe nothing is computed and no GPU is touched.

A probe runs a few real optimizer steps on batches of the full data, and a few of extraction's forward passes. Their times a
padded token give the hours of full data, of a random part as large as the selection, and of the selection itself.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .building import build_training, run_step
from .catalogue import device_note, is_for_cpu, memory_lines
from .distributed import Ranks, ensure_process_group
from .ds_config import resolve_config
from .estimate import arms_of, batch_text, loads_of_arms, loads_of_steps, steps_text
from .files import is_committed, read_json, write_json
from .models import load_model, load_tokenizer, model_folder, pad_token_id
from .plan import Plan, unselected
from .preflight import NEEDED_BY_PLAN, look
from .prepare import Prepared, extraction_dtype, prepare_tokens
from .proxy import Room, gradient_proxies, run_batches
from .recipe import Recipe
from .shapes import DATASET_ROWS, quadratic_cost, shape_of
from .shards import length_batches
from .tokens import TokenTable

PROBE = "probe.json"
_WARM_UP = 1  # steps and batches that are not counted: compilation, allocation, first communication
_PROBED_BATCHES = 4


@dataclass(frozen=True)
class Probe:
    """What a few steps have shown.

    Attributes:
        world_size: W.
        seconds_per_token: of training, a computed token of the slowest rank.
        extraction_seconds_per_token: of a forward pass, a padded token of one rank.
        quadratic_cost: of the model, see `shapes.quadratic_cost`.
        num_steps: that were timed.
        device: their name.
    """

    world_size: int
    seconds_per_token: float
    extraction_seconds_per_token: float
    quadratic_cost: float
    num_steps: int
    device: str


def dry_run(
    recipe: Recipe, output_dir: Path, ranks: Ranks, world_size: int, *, num_probe_steps: int = 0, price: float | None = None
) -> None:  # collective
    """Print the batch arithmetic, memory, what is missing, and, as far as it is known, samples, tokens, hours and cost.

    Args:
        recipe: what would be run.
        output_dir: the run's folder; a plan that lies there is counted.
        ranks: of this job; they are used by a probe alone.
        world_size: W of the run that is asked about.
        num_probe_steps: optimizer steps of the probe; 0 computes nothing.
        price: of a GPU hour.
    """
    items = ranks.on_main(lambda: _arithmetic(recipe, output_dir, ranks, world_size))
    if world_size != ranks.world_size and num_probe_steps:
        raise ValueError(f"a probe runs on this job's {ranks.world_size} ranks, --ranks asks for {world_size}: leave it out")
    if any(item.problem for item in items if item.name.startswith(NEEDED_BY_PLAN)):
        if num_probe_steps:
            raise ValueError("the probe needs the model and the data, see above")
        return
    base = ranks.on_every_node(lambda: model_folder(recipe.model))
    tokens = prepare_tokens(recipe, output_dir, ranks)
    selected = ranks.on_main(lambda: is_committed(output_dir / "plan"))
    plan = Plan.read(output_dir / "plan") if selected else _without_plan(recipe, tokens)
    ranks.on_main(lambda: _print_arms(recipe, plan, selected, ranks))
    if not num_probe_steps:
        return
    probe = _measure(recipe, Prepared(base, load_tokenizer(base), tokens, plan), ranks, num_probe_steps)
    lines, record = ranks.on_main(lambda: predict(recipe, plan, tokens, probe, price))
    ranks.print(*(f"[dry run] {line}" for line in lines))

    def keep() -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        write_json(output_dir / PROBE, record)

    ranks.on_main(keep)
    ranks.print(f"[dry run] kept in {output_dir / PROBE}: the run's summary will set it against what it measures")


def predict(
    recipe: Recipe, plan: Plan, tokens: TokenTable, probe: Probe, price: float | None
) -> tuple[list[str], dict[str, Any]]:
    """Hours of each arm from a probe.

    Returns:
        lines for people, and the same as numbers.
    """
    loads = loads_of_arms(plan, recipe, probe.world_size, probe.quadratic_cost)
    seconds = {name: float(load.sum()) * probe.seconds_per_token for name, load in loads.items()}
    batches = length_batches(tokens.num_tokens, recipe.selection.tokens_per_batch)
    forward = sum(len(batch) * int(tokens.num_tokens[batch].max()) for batch in batches) / probe.world_size
    selection = forward * probe.extraction_seconds_per_token

    def cost(value: float) -> str:
        return "" if price is None else f", {value / 3600 * probe.world_size * price:.2f} at {price:g} a GPU hour"

    lines = [
        f"probe: {probe.num_steps} steps on {probe.world_size} x {probe.device}, {1 / probe.seconds_per_token:.0f} computed "
        f"tokens/s a rank; extraction {1 / probe.extraction_seconds_per_token:.0f}"
    ]
    lines += [f"training on {name}: {duration(value)}{cost(value)}" for name, value in seconds.items()]
    lines.append(f"selection: {duration(selection)}{cost(selection)} for one forward pass; clustering comes on top")
    saved = seconds["full"] - seconds["CluSTER"]
    if saved > 0:
        epoch = seconds["full"] / recipe.train.epochs
        lines.append(
            f"the selection saves {duration(saved)} and costs {duration(selection)}: it has paid for itself after "
            f"{selection / (saved / recipe.train.epochs):.2f} epochs (one epoch of full data takes {duration(epoch)})"
        )
    record = {
        **asdict(probe), "seconds": seconds, "selection_seconds": selection, "recipe": _what_is_run(recipe),
        "price_per_gpu_hour": price,
    }
    return lines, record


def training_seconds(plan: Plan, recipe: Recipe, probe: dict[str, Any]) -> float:
    """Predicted seconds of all optimizer steps on a plan, without checkpoints and export."""
    loads = loads_of_steps(plan, recipe, probe["world_size"], probe["quadratic_cost"])
    return float(loads.max(axis=1).sum()) * probe["seconds_per_token"]


def prediction_rows(told: dict[str, Any]) -> list[list[str]]:
    """A summary's prediction in words: what, predicted, measured, their ratio."""
    rows = []
    for what in ("steps", "extraction"):
        predicted, measured = told[f"{what}_predicted"], told[f"{what}_measured"]
        ratio = f"{predicted / measured:.2f} x" if measured else ""
        rows.append([what, duration(predicted), duration(measured) if measured else "reused", ratio])
    return rows


def duration(seconds: float) -> str:
    """E.g. "2.1 h", "3.4 min", "12 s"."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def prediction_of(output_dir: Path, world_size: int, recipe: Recipe) -> dict[str, Any] | None:
    """A probe's record that speaks of this very run, else None."""
    path = output_dir / PROBE
    record = read_json(path) if path.is_file() else None
    if record is None or record["world_size"] != world_size or record["recipe"] != _what_is_run(recipe):
        return None
    return record


def _what_is_run(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(include={"model", "data", "selection", "train", "deepspeed"})


def _arithmetic(recipe: Recipe, output_dir: Path, ranks: Ranks, world_size: int) -> list[Any]:
    train, selection = recipe.train, recipe.selection
    budget = f"keep {selection.keep}" if selection.keep is not None else f"ratio {selection.ratio or 1.0}"
    lines = [
        f"recipe {recipe.name}: {batch_text(recipe, world_size)}, {train.epochs} epochs; {recipe.deepspeed.config}, "
        f"{train.precision}, {train.optimizer}; K = {_clusters(recipe, world_size)}, {budget}",
        *(note.strip() for note in device_note(recipe, world_size)),
    ]
    rows = sum(DATASET_ROWS.get(source.path, 0) for source in recipe.data.all_sources.values())
    if rows:
        lines.append(f"full data: {rows} rows, {steps_text(rows, train)}; the selection keeps at most its ratio of them")
    items = look(recipe, output_dir, world_size)
    folder = next((i.folder for i in items if i.name.endswith(recipe.model.name_or_path) and not i.problem), None)
    shape = shape_of(recipe.model.name_or_path, folder)
    if shape is None:
        lines.append(f"memory: not estimated, the shape of {recipe.model.name_or_path} is not known here")
    elif is_for_cpu(recipe):
        lines.append("memory: not estimated for the CPU; a run prints each stage's peak")
    else:
        lines += memory_lines(shape, recipe, world_size)
    ranks.print(*(f"[dry run] {line}" for line in lines), *(f"[dry run] {item.line()}" for item in items))
    missing = sum(item.problem is not None for item in items)
    ranks.print(f"[dry run] {missing} of {len(items)} items are missing" if missing else "[dry run] everything is here")
    return items


def _clusters(recipe: Recipe, world_size: int) -> int:
    return world_size if recipe.selection.num_clusters == "world" else recipe.selection.num_clusters


def _print_arms(recipe: Recipe, plan: Plan, selected: bool, ranks: Ranks) -> None:
    if not selected:
        ranks.print("[dry run] nothing is selected yet: for random and CluSTER the most that they may keep is assumed")
    for name, arm in arms_of(plan, recipe.train.seed).items():
        number = int(arm.kept.sum())
        ranks.print(
            f"[dry run] {name}: {number} samples ({number / len(plan):.1%}), {int(arm.num_tokens[arm.kept].sum())} tokens, "
            f"{int(arm.num_supervised_tokens[arm.kept].sum())} supervised; {steps_text(number, recipe.train)}"
        )


def _without_plan(recipe: Recipe, tokens: TokenTable) -> Plan:
    """A stand-in before the selection: the most that it may keep, drawn at random, in one cluster."""
    n = len(tokens)
    share = recipe.selection.ratio or recipe.selection.keep or 1.0
    kept = np.zeros(n, dtype=bool)
    kept[np.random.default_rng((recipe.train.seed, 1)).permutation(n)[: max(1, int(share * n))]] = True
    plan = Plan(
        ids=tokens.ids, cluster=np.zeros(n, dtype=np.int32), stratum=np.zeros(n, dtype=np.int32), distance=np.zeros(n),
        weight=np.ones(n), kept=np.ones(n, dtype=bool), num_tokens=tokens.num_tokens,
        num_supervised_tokens=tokens.num_supervised, loss=np.full(n, np.nan, dtype=np.float32),
    )
    return unselected(plan, kept)


def _measure(recipe: Recipe, prepared: Prepared, ranks: Ranks, num_steps: int) -> Probe:  # collective
    """Time optimizer steps on batches of the full data, then forward passes of extraction; nothing is kept."""
    forward = _time_extraction(recipe, prepared, ranks)
    full = unselected(prepared.plan, np.ones(len(prepared.plan), dtype=bool))
    config = resolve_config(recipe.deepspeed.config, recipe.train, ranks.world_size)
    ensure_process_group(ranks)
    engine, loader = build_training(
        recipe, Prepared(prepared.model_folder, prepared.tokenizer, prepared.tokens, full), config, ranks
    )
    attention = quadratic_cost(prepared.model_folder)
    loads = loads_of_steps(full, recipe, ranks.world_size, attention, num_steps + _WARM_UP).max(axis=1)
    seconds = []
    batches = iter(loader)
    for _ in loads:
        started = time.perf_counter()
        run_step(engine, batches)
        _ = engine.last_record.loss  # waits for the device, as the log of a run does
        seconds.append(time.perf_counter() - started)
    counted = slice(_WARM_UP if len(loads) > _WARM_UP else 0, None)
    rate = sum(seconds[counted]) / float(loads[counted].sum())
    name = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "CPU rank"
    slowest = max(ranks.gather(rate))
    return Probe(ranks.world_size, slowest, max(ranks.gather(forward)), attention, len(loads[counted]), name)


def _time_extraction(recipe: Recipe, prepared: Prepared, ranks: Ranks) -> float:
    """Seconds a padded token of a forward pass, from batches of middling length."""
    tokens, selection = prepared.tokens, recipe.selection
    batches = length_batches(tokens.num_tokens, selection.tokens_per_batch)
    middle = batches[len(batches) // 4 :][: _PROBED_BATCHES + _WARM_UP]
    threads = torch.get_num_threads()
    if ranks.device.type == "cpu":
        torch.set_num_threads(selection.cpu_threads)
    model = load_model(prepared.model_folder, recipe.model, extraction_dtype(recipe), ranks.device).eval()
    pad = pad_token_id(prepared.tokenizer)
    count, spent = 0, 0.0
    started = time.perf_counter()
    for number, (rows, proxies) in enumerate(
        run_batches(model, tokens, middle, pad, ranks.device, Room(), gradient_proxies)
    ):
        float(proxies[2].sum())  # waits for the device
        now = time.perf_counter()
        if number >= _WARM_UP or len(middle) <= _WARM_UP:
            count += len(rows) * int(tokens.num_tokens[rows].max())
            spent += now - started
        started = now
    del model
    torch.set_num_threads(threads)
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return spent / count
