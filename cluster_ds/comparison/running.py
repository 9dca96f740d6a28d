"""The loop over arms, seeds and sweeps: plan, train, judge, write one line of results.jsonl.

Whatever needs no training of its own is planned first, for all seeds and points: a budget that some clusters cannot pay for
is refused before anything is trained. Tokens and proxies are shared, scores are made once, the model starts from the same
weights in every run. A line is written when a run is done; the same command goes on behind the last line, and inside the
run that was stopped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..baselines import full
from ..baselines.setting import Budget, Setting, alone, in_all, key_of, remove_training, seconds_of
from ..baselines.variants import paper_settings
from ..distributed import Ranks
from ..files import is_committed, write_text
from ..plan import Plan
from ..planning import plan_from
from ..prepare import Prepared, Samples, cluster_samples, extract_proxies, plan_settings, prepare_samples, told_warnings
from ..recipe import Recipe
from ..resuming import FREE_TO_CHANGE
from ..run_log import read_lines
from ..runs import held_out_losses, held_out_tokens
from ..sample_losses import mean_losses
from ..shards import length_batches, shard_batches
from ..training import train
from .arms import ARMS, OURS, SCORES

RESULTS = "results.jsonl"
MATCHES = ("samples", "tokens", "steps")
_FEWEST_HELD_OUT = 4


@dataclass(frozen=True)
class Point:
    """One setting of a sweep: "selection.ratio=0.5", or "" where nothing is swept, and the recipe that it makes."""

    label: str
    recipe: Recipe

    @property
    def folder_name(self) -> str:
        """A folder's name that says which point it is."""
        return self.label.replace("/", "_") or "runs"


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        points: of the sweep, at least one.
        arms: names of `ARMS`.
        seeds: of clustering, draws and training; the same for every arm.
        match: what all arms have equal to CluSTER's: "samples", "tokens" (about), or "steps" (samples, full data as well).
        keep_models: whether the trained models stay, for benchmarks.
    """

    points: list[Point]
    arms: list[str]
    seeds: list[int]
    match: str
    keep_models: bool

    @property
    def num_runs(self) -> int:
        """Trainings in all."""
        return len(self.points) * len(self.arms) * len(self.seeds)


def require_comparable(comparison: Comparison) -> None:
    """Refuse what would fail after hours.

    Raises:
        ValueError: with the remedy.
    """
    for point in comparison.points:
        recipe = point.recipe
        if not recipe.held_out:
            raise ValueError("a comparison needs held-out rows: name evaluate.held_out in the recipe")
        if "s2l" in comparison.arms and recipe.baselines.s2l.model is None:
            raise ValueError("s2l needs a small model: name baselines.s2l.model.name_or_path, or leave s2l out of --arms")
        if recipe.model.lora is not None and "less" in comparison.arms:
            raise ValueError("less brings adapters of its own (baselines.less.lora): leave it out where model.lora is set")


def compare(
    comparison: Comparison, output_dir: Path, ranks: Ranks, report: Callable[[], None]
) -> None:  # collective
    """Run what is missing of a comparison.

    Args:
        comparison: says what.
        output_dir: its folder.
        ranks: all call this.
        report: called on rank 0 when a run is done.
    """
    done = ranks.on_main(lambda: len(read_lines(output_dir / RESULTS)))
    if done:
        ranks.print(f"[compare] {done} runs of {output_dir / RESULTS} are done already")
    all_runs = [_Runs(comparison, point, output_dir, ranks, report) for point in comparison.points]
    for runs in all_runs:
        runs.plan()
    for runs in all_runs:
        runs.train()


class _Runs:
    """All arms and seeds at one point of a sweep."""

    def __init__(  # collective
        self, comparison: Comparison, point: Point, output_dir: Path, ranks: Ranks, report: Callable[[], None]
    ):
        self.comparison, self.point, self.output_dir, self.ranks, self.report = comparison, point, output_dir, ranks, report
        self.folder = output_dir / point.folder_name
        self.settings: dict[int, Setting] = {}  # by seed, where runs are missing
        self.samples: Samples = prepare_samples(point.recipe, output_dir, ranks)
        held_out = held_out_tokens(point.recipe, output_dir, ranks)
        assert held_out is not None  # require_comparable
        self.held_out, self.is_test = held_out, is_test(held_out.ids)
        if len(held_out) < _FEWEST_HELD_OUT:
            raise ValueError(
                f"{len(held_out)} held-out rows: a comparison needs {_FEWEST_HELD_OUT} or more, half of which decide and "
                "half report; raise evaluate.max_samples or name more rows"
            )

    def plan(self) -> None:  # collective
        """The plans of all missing runs, but for those that scores decide: these take training."""
        for seed in self.comparison.seeds:
            waiting = self._waiting(seed)
            if not waiting:
                continue
            setting = self._setting(seed)
            for arm in waiting:
                if arm not in SCORES:
                    self._plan(arm, seed, setting)
            self.settings[seed] = replace(setting, clustered=None)  # gigabytes, at a million samples

    def train(self) -> None:  # collective
        """Everything that results.jsonl does not hold."""
        if self._missing("untrained", 0):
            losses, _ = held_out_losses(
                self.point.recipe, self.held_out, self.samples.model_folder, self.output_dir, self.ranks
            )
            self._write("untrained", 0, losses, {})
        for seed in self.comparison.seeds:
            waiting = self._waiting(seed)
            for arm in self.comparison.arms:
                if arm in waiting:
                    self._one_run(arm, seed, self.settings[seed])
                else:
                    self._clean(self._folder(arm, seed))

    def _waiting(self, seed: int) -> list[str]:  # collective
        return [arm for arm in self.comparison.arms if self._missing(arm, seed)]

    def _recipe(self, seed: int) -> Recipe:
        """The point's recipe with a seed for everything that is drawn.

        Held-out rows are looked at behind training. Samples are dealt to the ranks by tokens: the gradient is the same, and
        no arm's time is that of its longest cluster.
        """
        recipe = self.point.recipe
        return alone(
            recipe, selection=recipe.selection.model_copy(update={"seed": seed}),
            train=recipe.train.model_copy(update={"seed": seed, "allocation": "tokens"}),
        )

    def _setting(self, seed: int) -> Setting:  # collective
        """Proxies, clusters and CluSTER's own plan, whose size is the budget."""
        recipe, ranks, samples = self._recipe(seed), self.ranks, self.samples
        extract_proxies(recipe, samples, ranks)
        path, tokens, key = self.folder / f"seed-{seed}" / "plan", samples.tokens, self._key(OURS, seed)
        clustered = None

        def cluster_and_plan() -> float:
            nonlocal clustered
            started = time.perf_counter()
            with told_warnings(ranks):
                clustered = cluster_samples(recipe, samples, ranks)
            seconds, kept = time.perf_counter() - started, _read_plan(path, key)
            if kept is None:
                _write_plan(plan_from(clustered, paper_settings(clustered.settings), lambda line: None), path, key)
            elif not np.array_equal(kept.cluster, clustered.column(clustered.clusters.labels, -1, np.int32)):
                raise ValueError(
                    f"the clusters are not those of {path} any more, so arms before and after cannot be compared: go on "
                    f"where the comparison was begun, or delete {self.output_dir}"
                )
            return seconds

        seconds = ranks.on_main(cluster_and_plan)
        batches = length_batches(tokens.num_tokens, recipe.selection.tokens_per_batch)
        extraction = seconds_of(samples.proxies_folder, len(shard_batches(batches)), ranks)
        return Setting(
            recipe, samples, Plan.read(path), self.output_dir / "scores", ranks, self.held_out,
            np.flatnonzero(~self.is_test), clustered, in_all(extraction, seconds),
        )

    def _plan(self, arm: str, seed: int, setting: Setting) -> None:  # collective
        """Write what an arm keeps, at CluSTER's budget."""
        folder, key = self._folder(arm, seed) / "plan", self._key(arm, seed)
        base, match = setting.base, self.comparison.match
        wanted = int(base.num_tokens[base.kept].sum()) if match == "tokens" else None
        budget = Budget(int(base.kept.sum()), wanted)
        select = full.select_for_steps if (arm, match) == ("full", "steps") else ARMS[arm]

        def make_plan() -> None:
            if _read_plan(folder, key) is not None:
                return
            started = time.perf_counter()
            plan = select(setting, budget, seed)
            if arm in SCORES:  # what turns scores into a plan counts as well
                cost = plan.manifest["cost"]
                cost["seconds"] = in_all(cost["seconds"], time.perf_counter() - started)
            _write_plan(plan, folder, key)

        self.ranks.on_main(make_plan)

    def _one_run(self, arm: str, seed: int, setting: Setting) -> None:  # collective
        folder, ranks, recipe, key = self._folder(arm, seed), self.ranks, setting.recipe, self._key(arm, seed)
        ranks.print(f"[compare] {self._name(arm, seed)}")
        if arm in SCORES:
            SCORES[arm](setting)
        self._plan(arm, seed, setting)
        plan = Plan.read(folder / "plan")
        passes = plan.manifest["selection"].get("passes", recipe.train.epochs)
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"epochs": passes})})
        twin = ranks.on_main(lambda: self._twin(plan, recipe))
        if twin is not None:
            ranks.print(f"[compare] the same plan was trained in the same way as {self._name(twin['arm'], twin['seed'])}")
            ranks.on_main(lambda: self._append({**twin, "point": self.point.label, "arm": arm, "key": key}))
            return
        prepared = Prepared(self.samples.model_folder, self.samples.tokenizer, self.samples.tokens, plan)
        result = train(recipe, prepared, folder, ranks)
        losses, _ = held_out_losses(recipe, self.held_out, result.model, self.output_dir, ranks)
        log = ranks.on_main(lambda: read_lines(folder / "log.jsonl"))
        facts = {
            "kept": int(plan.kept.sum()), "steps": result.num_steps,
            **{name: sum(e[name] for e in log) for name in ("num_samples", "num_supervised_tokens", "num_tokens")},
            "cost": plan.manifest["cost"], "training_seconds": sum(e["seconds"] for e in log), "plan_hash": plan.hash,
            "training_key": self._training_key(recipe),
            "folder": str(folder.relative_to(self.output_dir)),
        }
        self._write(arm, seed, losses, facts)
        self._clean(folder)

    def _folder(self, arm: str, seed: int) -> Path:
        return self.folder / f"seed-{seed}" / arm

    def _clean(self, folder: Path) -> None:  # collective
        self.ranks.on_main(lambda: remove_training(folder, model=not self.comparison.keep_models))

    def _twin(self, plan: Plan, recipe: Recipe) -> dict[str, Any] | None:
        """A finished run of the very same plan and training, e.g. of all the data at another point of a sweep."""
        for entry in read_lines(self.output_dir / RESULTS):
            if entry.get("plan_hash") == plan.hash and entry["training_key"] == self._training_key(recipe):
                return entry
        return None

    def _missing(self, arm: str, seed: int) -> bool:  # collective
        """Whether results.jsonl lacks a run.

        Raises:
            ValueError: if it holds one of other settings.
        """
        key = self._key(arm, seed)

        def look() -> bool:
            for entry in read_lines(self.output_dir / RESULTS):
                if entry["match"] != self.comparison.match:
                    raise ValueError(
                        f"{self.output_dir / RESULTS} holds arms that are equal in {entry['match']}, not in "
                        f"{self.comparison.match}: choose another --output_dir"
                    )
                if (entry["point"], entry["arm"], entry["seed"]) == (self.point.label, arm, seed):
                    if entry["key"] != key:
                        raise ValueError(
                            f"{self.output_dir / RESULTS} holds {self._name(arm, seed)} of other settings, data or another "
                            "model: choose another --output_dir, or delete the line"
                        )
                    return False
            return True

        return self.ranks.on_main(look)

    def _key(self, arm: str, seed: int) -> str:
        recipe, provenance = self._recipe(seed), self.samples.provenance
        if arm == "untrained":
            return key_of(provenance["model"], self.held_out.key)
        own = getattr(recipe.baselines, arm).model_dump() if arm in SCORES else {}
        selection = plan_settings(recipe, self.ranks.world_size)
        return key_of(selection, self._training_key(recipe), own, provenance)

    def _training_key(self, recipe: Recipe) -> str:
        """Hash of what decides a run beside its plan."""
        model, config = recipe.model.model_dump(), recipe.deepspeed.config
        train_settings = recipe.train.model_dump(exclude=FREE_TO_CHANGE)
        return key_of(model, config, train_settings, self.samples.provenance["model"], self.held_out.key)

    def _write(self, arm: str, seed: int, losses: np.ndarray, facts: dict[str, Any]) -> None:
        """Add a run's line; it is on disk when this returns."""
        test, sources = self.is_test, np.array(self.held_out.sources)
        supervised = self.held_out.num_supervised
        entry = {
            "point": self.point.label, "arm": arm, "seed": seed, "match": self.comparison.match, "key": self._key(arm, seed),
            **facts, "validation": mean_losses(losses[~test], supervised[~test]),
            "test": mean_losses(losses[test], supervised[test]),
            "sources": {name: float(losses[test & (sources == name)].mean()) for name in sorted(set(sources[test]))},
            "test_losses": losses[test].tolist(), "test_sources": sources[test].tolist(),
        }

        self.ranks.on_main(lambda: self._append(entry))
        told = f"validation loss {entry['validation']['sample_mean']:.4f}, test loss {entry['test']['sample_mean']:.4f}"
        self.ranks.print(f"[compare] {self._name(arm, seed)}: {told}")

    def _append(self, entry: dict[str, Any]) -> None:
        """Write a line, behind those that can be read: a killed run may have left half of one."""
        path = self.output_dir / RESULTS
        write_text(path, "".join(json.dumps(e) + "\n" for e in [*read_lines(path), entry]))
        self.report()

    def _name(self, arm: str, seed: int) -> str:
        return ", ".join(part for part in (arm, f"seed {seed}", self.point.label) if part)


def _read_plan(folder: Path, key: str) -> Plan | None:
    """A plan that was written with this key."""
    plan = Plan.read(folder) if is_committed(folder) else None
    return plan if plan is not None and plan.manifest.get("comparison_key") == key else None


def _write_plan(plan: Plan, folder: Path, key: str) -> None:
    plan.manifest["comparison_key"] = key
    plan.write(folder)


def is_test(ids: Sequence[str]) -> np.ndarray:
    """Bool [n], every other held-out row in the order of a hash of its id: one half reports, the other half may decide."""
    order = np.argsort([hashlib.blake2b(name.encode()).hexdigest() for name in ids], kind="stable")
    out = np.zeros(len(ids), dtype=bool)
    out[order[1::2]] = True
    return out
