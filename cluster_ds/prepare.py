"""Stages 1 to 6 in order for a recipe: rows -> tokens -> proxies -> clusters -> selection -> plan.

Every stage is kept on disk under a hash of what it depends on, so a second run reuses what is finished and says so.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .distributed import Ranks
from .embedded import resolve_data
from .files import exclusive, is_committed, require_ours
from .memory import peak_memory
from .models import (
    load_model,
    load_tokenizer,
    model_folder,
    model_hash,
    pad_token_id,
    require_vocabulary,
    sentencepiece_differences,
    text_config,
)
from .plan import Plan
from .planning import Clustered, cluster_features, plan_from
from .preview import print_preview
from .proxy import extract, proxy_key
from .recipe import Recipe, SourceSection
from .records import Source, read_records
from .selection import PlanSettings, budget_of
from .shards import read_proxies
from .templates import get_template
from .tokens import TokenTable, build_tokens

_SHOWN_TOKENS = 60  # of an extreme row


@dataclass
class Prepared:
    """What training needs.

    Attributes:
        model_folder: the base model on this machine.
        tokenizer: of the base model.
        tokens: the samples.
        plan: what is kept.
        seconds: wall time of each stage, by its name; 0 where it was reused.
    """

    model_folder: Path
    tokenizer: Any
    tokens: TokenTable
    plan: Plan
    seconds: dict[str, float] = field(default_factory=dict)


def cache_dir(recipe: Recipe, output_dir: Path) -> Path:
    """Tokens and proxies live beside the runs that share them."""
    return Path(recipe.data.cache_dir).expanduser().resolve() if recipe.data.cache_dir else output_dir.parent / "cache"


def extraction_dtype(recipe: Recipe) -> torch.dtype:
    """The model scores samples in the dtype that its forward pass has in training."""
    return torch.float32 if recipe.train.precision == "fp32" else torch.bfloat16


def train_sources(recipe: Recipe) -> dict[str, Source]:
    """What the recipe trains on."""
    return {name: _source(section) for name, section in recipe.data.all_sources.items()}


def held_out_sources(recipe: Recipe) -> dict[str, Source]:
    """What the held-out loss is measured on."""
    return {name: _source(section) for name, section in recipe.held_out.items()}


def _source(section: SourceSection) -> Source:
    return Source(**{**section.model_dump(), "path": resolve_data(section.path)})


def prepare_tokens(
    recipe: Recipe, output_dir: Path, ranks: Ranks, *, held_out: bool = False, preview: int = 0
) -> TokenTable:  # collective
    """Read, tokenise and audit the training rows or the held-out ones on rank 0; all ranks open the result.

    Args:
        recipe: says what.
        output_dir: the run's folder.
        ranks: all call this.
        held_out: which rows.
        preview: samples to print with their supervised tokens marked.
    """
    label = "held-out" if held_out else "tokens"

    def work() -> tuple[Path, list[str]]:
        data = recipe.data
        sources = held_out_sources(recipe) if held_out else train_sources(recipe)
        records, reports = read_records(sources, data.max_bad_fraction)
        if held_out:  # of each source, evenly spread: files are often sorted by some criterion
            groups = [[record for record in records if record.source == name] for name in sources]
            most = recipe.evaluate.max_samples
            records = [record for group in groups if group for record in group[:: -(-len(group) // most)]]
        base = model_folder(recipe.model)
        tokenizer = load_tokenizer(base)
        ranks.print(*(f"[{label}] {line}" for line in sentencepiece_differences(base, tokenizer)))
        template = get_template(data.template, tokenizer)
        table, cached = build_tokens(records, template, tokenizer, data.max_length, cache_dir(recipe, output_dir))
        lines = [line for report in reports for line in report.lines()]
        lines += table.report.lines(records, data.max_length)
        ranks.print(*(f"[{label}] {line}" for line in lines))
        ranks.print(f"[{label}] {len(table)} samples" + (" (cached)" if cached else ""))
        if preview:
            print_preview(table, tokenizer, preview)
        table.report.require(
            max_bad_fraction=data.max_bad_fraction, max_masked_fraction=data.max_masked_fraction, max_length=data.max_length
        )
        return table.folder, lines

    return TokenTable(*ranks.on_main(work))


@dataclass
class Samples:
    """What selection begins with.

    Attributes:
        model_folder: the base model on this machine.
        tokenizer: of the base model.
        tokens: the samples.
        provenance: hashes of what a plan is made from.
        proxies_folder: where the proxies' shards belong.
        seconds: wall time of the tokens.
    """

    model_folder: Path
    tokenizer: Any
    tokens: TokenTable
    provenance: dict[str, Any]
    proxies_folder: Path
    seconds: float


def prepare_samples(recipe: Recipe, output_dir: Path, ranks: Ranks) -> Samples:  # collective
    """Model, tokenizer and tokens of a recipe; refuses what selection or training would refuse."""
    base = ranks.on_every_node(lambda: model_folder(recipe.model))
    tokenizer = load_tokenizer(base)
    started = time.perf_counter()
    with peak_memory("tokens", ranks):
        tokens = prepare_tokens(recipe, output_dir, ranks)
    ranks.on_main(lambda: _require_enough(recipe, len(tokens), ranks.world_size))
    ranks.on_main(lambda: require_vocabulary(base, tokens))
    seconds = time.perf_counter() - started

    selection = recipe.selection
    weights_hash = ranks.on_main(lambda: model_hash(base))
    key = proxy_key(
        tokens.key, weights_hash, extraction_dtype(recipe), ranks.device, selection.tokens_per_batch, selection.cpu_threads
    )
    provenance = {
        "data": tokens.data_hash, "tokens": tokens.key, "template": recipe.data.template,
        "max_length": recipe.data.max_length, "model": weights_hash, "model_name": recipe.model.name_or_path,
        "proxies": key,
    }
    return Samples(base, tokenizer, tokens, provenance, cache_dir(recipe, output_dir) / "proxies" / key, seconds)


def extract_proxies(recipe: Recipe, samples: Samples, ranks: Ranks) -> float:  # collective
    """Make the proxies that are missing.

    Returns:
        wall seconds.
    """
    started, selection = time.perf_counter(), recipe.selection
    with peak_memory("proxies", ranks), only_job(samples.proxies_folder, ranks):
        num_reused = extract(
            samples.tokens, samples.proxies_folder,
            lambda: load_model(samples.model_folder, recipe.model, extraction_dtype(recipe), ranks.device), ranks,
            key=samples.provenance["proxies"], pad_id=pad_token_id(samples.tokenizer),
            tokens_per_batch=selection.tokens_per_batch, cpu_threads=selection.cpu_threads,
            hidden_size=text_config(samples.model_folder).hidden_size,
        )
    seconds = time.perf_counter() - started
    ranks.print(f"[proxies] {samples.proxies_folder} ({num_reused} finished shards reused, {seconds:.1f} s)")
    return seconds


def cluster_samples(recipe: Recipe, samples: Samples, ranks: Ranks) -> Clustered:
    """Cluster the samples by their proxies, on rank 0."""
    tokens = samples.tokens
    proxies = read_proxies(
        samples.proxies_folder, tokens, recipe.selection.tokens_per_batch, samples.provenance["proxies"]
    )
    return cluster_features(
        proxies.features, tokens.ids, tokens.num_tokens, PlanSettings(**plan_settings(recipe, ranks.world_size)),
        num_supervised_tokens=tokens.num_supervised, losses=proxies.losses, norms=proxies.norms, sources=tokens.sources,
        provenance=samples.provenance, device=ranks.device, report=lambda line: ranks.print(f"[plan] {line}"),
    )


def prepare(recipe: Recipe, output_dir: Path, ranks: Ranks) -> Prepared:  # collective
    """Make the plan of a recipe, or reuse the one in `output_dir/plan`.

    Raises:
        ValueError: if a plan is there that was made from something else, naming what differs.
    """
    samples = prepare_samples(recipe, output_dir, ranks)
    base, tokenizer, tokens = samples.model_folder, samples.tokenizer, samples.tokens
    seconds = {"tokens": samples.seconds}
    settings = plan_settings(recipe, ranks.world_size)
    plan_folder = output_dir / "plan"
    ranks.on_main(lambda: require_ours(plan_folder))
    if ranks.on_main(lambda: is_committed(plan_folder)):
        ranks.on_main(lambda: _require_match(plan_folder, samples.provenance, settings))
        plan = Plan.read(plan_folder)
        ranks.print(f"[plan] reused {plan_folder}", *(f"[plan] {line}" for line in plan.lines()))
        return Prepared(base, tokenizer, tokens, plan, {**seconds, "proxies": 0.0, "plan": 0.0})
    seconds["proxies"] = extract_proxies(recipe, samples, ranks)

    def select_and_write() -> None:
        with told_warnings(ranks):
            clustered = cluster_samples(recipe, samples, ranks)
            plan = plan_from(clustered, PlanSettings(**settings), lambda line: ranks.print(f"[plan] {line}"))
        shown = {row["id"]: row for row in plan.manifest["extreme_rows"]}
        for number, name in enumerate(tokens.ids):
            if name in shown:
                shown[name]["text"] = tokenizer.decode(tokens[number]["input_ids"][:_SHOWN_TOKENS])
        plan.write(plan_folder)

    started = time.perf_counter()
    with peak_memory("plan", ranks):
        ranks.on_main(select_and_write)
        plan = Plan.read(plan_folder)
    seconds["plan"] = time.perf_counter() - started
    ranks.print(*(f"[plan] {line}" for line in plan.lines()), f"[plan] written to {plan_folder}")
    return Prepared(base, tokenizer, tokens, plan, seconds)


@contextmanager
def told_warnings(ranks: Ranks) -> Iterator[None]:
    """Say what selection warns of, as lines of the job's log."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    ranks.print(*(f"[plan] warning: {w.message}" for w in caught if issubclass(w.category, UserWarning)))


def plan_settings(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """The arguments of `make_plan` that the recipe's selection section stands for."""
    section = recipe.selection
    k = world_size if section.num_clusters == "world" else section.num_clusters
    return asdict(PlanSettings(**{**section.plan_settings, "num_clusters": k}))


@contextmanager
def only_job(folder: Path, ranks: Ranks) -> Iterator[None]:  # collective
    """Let one job at a time build a shared folder; another one waits and then finds it finished."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        waiting = f"[proxies] another job builds {folder}: waiting for it"
        ranks.on_main(lambda: held.enter_context(exclusive(folder, waiting)))
        yield


def _require_enough(recipe: Recipe, num_samples: int, world_size: int) -> None:
    """Refuse what selection or training would refuse, before the model runs over the data."""
    k = plan_settings(recipe, world_size)["num_clusters"]
    if num_samples < k:
        raise ValueError(f"{num_samples} samples cannot fill {k} clusters: lower selection.num_clusters or add data")
    size = recipe.train.global_batch_size
    selection = recipe.selection
    most = budget_of(1.0 - selection.trim if selection.keep is None else selection.keep, num_samples)
    if most < size:
        raise ValueError(
            f"at most {most} of {num_samples} samples can be kept, fewer than global_batch_size {size}: lower "
            "train.global_batch_size or raise the budget"
        )
    if size < k:
        raise ValueError(
            f"global_batch_size {size} is smaller than the {k} clusters, so a batch cannot hold one sample of each: raise "
            "train.global_batch_size or lower selection.num_clusters"
        )


def _require_match(folder: Path, provenance: dict[str, Any], settings: dict[str, Any]) -> None:
    different = Plan.read(folder).differences(provenance, settings)
    if different:
        raise ValueError(
            f"plan {folder} was made from something else:\n  "
            + "\n  ".join(different)
            + f"\ndelete {folder} to make it again, or choose another --output_dir"
        )
