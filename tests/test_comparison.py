"""Arms that are plans of one clustering, the tables of a comparison, and a comparison that is killed and continued."""

import json
import os
import re
import signal
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from cluster_ds.baselines import full, random_sample, variants
from cluster_ds.baselines.setting import Budget, Setting
from cluster_ds.comparison.arms import ARMS, arms_of
from cluster_ds.comparison.running import Comparison, Point, require_comparable
from cluster_ds.comparison.tables import differences, markdown, page, tables_of
from cluster_ds.planning import cluster_features, plan_from
from cluster_ds.recipe_file import load_recipe
from cluster_ds.run_log import read_lines
from cluster_ds.selection import PlanSettings

from .forked import finish, start

N, K = 240, 3


@pytest.fixture(scope="module")
def setting():
    """240 samples in three clusters of unequal sizes, the far ones with short answers."""
    rng = np.random.default_rng(0)
    kinds = np.repeat([0, 1, 2], [120, 70, 50])
    features = np.eye(K)[kinds] * 3 + rng.normal(size=(N, K)) * rng.uniform(0.1, 1.2, (N, 1))
    lengths = rng.integers(20, 200, N)
    supervised = np.maximum(1, (lengths * 0.7 / (1 + np.linalg.norm(features - np.eye(K)[kinds] * 3, axis=1))).astype(int))
    settings = PlanSettings(num_clusters=K, keep=0.3, seed=5)
    clustered = cluster_features(
        features, [f"s{i:03d}" for i in range(N)], lengths, settings, num_supervised_tokens=supervised,
        provenance={"model": "m"},
    )
    base = plan_from(clustered, variants.paper_settings(settings), lambda line: None)
    samples = SimpleNamespace(tokens=range(N))
    return Setting(None, samples, base, None, None, clustered=clustered, seconds_to_cluster=2.0)  # type: ignore[arg-type]


def budget_of(setting):
    return Budget(int(setting.base.kept.sum()))


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_every_variant_keeps_the_budget_and_says_what_it_cost(setting, name):
    plan = variants.select(setting, budget_of(setting), 5, name=name)
    assert abs(int(plan.kept.sum()) - 72) <= 0 and plan.manifest["selection"]["arm"] == name
    assert plan.manifest["cost"]["forwards"] == N and plan.manifest["cost"]["seconds"] >= 2.0
    counts = np.bincount(plan.cluster[plan.kept], minlength=K)
    sizes = np.bincount(plan.cluster, minlength=K)
    quota = variants.VARIANTS[name].get("quota", "equal")
    if quota == "equal":
        assert counts.tolist() == [24, 24, 24]
    elif quota == "proportional":
        assert np.abs(counts - 72 * sizes / N).max() <= 1
    if name in ("uniform", "cluster-noweight"):
        assert (plan.weight[plan.kept] == 1).all()
    elif name != "cluster-calibrated":
        expected = sizes[plan.cluster] / N * 72 / counts[plan.cluster]
        assert np.allclose(plan.weight[plan.kept], expected[plan.kept])
    assert (plan.redraw_seed is not None) == ("redraw" in name)


def test_periphery_and_core_are_the_ends_of_every_cluster(setting):
    outer, inner = (variants.select(setting, budget_of(setting), 5, name=f"cluster{what}") for what in ("", "-core"))
    for c in range(K):
        mine = outer.cluster == c
        assert outer.distance[mine & outer.kept].min() >= outer.distance[mine & ~outer.kept].max()
        assert inner.distance[mine & inner.kept].max() <= inner.distance[mine & ~inner.kept].min()
    assert np.array_equal(outer.kept, setting.base.kept)


def test_random_arms(setting):
    plan = random_sample.select(setting, budget_of(setting), 1)
    again, other = (random_sample.select(setting, budget_of(setting), seed) for seed in (1, 2))
    assert plan.kept.sum() == 72 and (plan.weight[plan.kept] == 1).all() and set(plan.stratum[plan.kept]) == {0}
    assert np.array_equal(plan.kept, again.kept) and not np.array_equal(plan.kept, other.kept)
    redrawn = random_sample.select_redrawn(setting, budget_of(setting), 1)
    assert np.array_equal(redrawn.kept_in(0), plan.kept) and not np.array_equal(redrawn.kept_in(1), plan.kept)
    assert redrawn.kept_in(1).sum() == 72
    everything = full.select(setting, budget_of(setting), 1)
    assert everything.kept.all()


@pytest.mark.parametrize(("epochs", "passes", "kept"), [(2, 1, 144), (3, 1, 216), (4, 2, 144)])
def test_full_data_for_equal_steps_is_seen_as_seldom_as_can_be(setting, epochs, passes, kept):
    """72 samples in each of so many epochs, of 240."""
    recipe = SimpleNamespace(train=SimpleNamespace(epochs=epochs))
    plan = full.select_for_steps(replace(setting, recipe=recipe), budget_of(setting), 1)
    assert plan.manifest["selection"]["passes"] == passes and plan.kept_in(0).sum() == kept
    assert (plan.redraw_seed is None) == (passes == 1)


def test_random_of_the_same_lengths(setting):
    """CluSTER's answers are shorter than the average; the matched arm's are as short, at random otherwise."""
    base, answers = setting.base, setting.base.num_supervised_tokens
    matched = random_sample.select_of_lengths(setting, budget_of(setting), 1)
    plain = random_sample.select(setting, budget_of(setting), 1)
    wanted = answers[base.kept].mean()
    assert matched.kept.sum() == 72 and abs(answers[matched.kept].mean() - wanted) < 0.05 * wanted
    assert abs(answers[plain.kept].mean() - wanted) > 0.1 * wanted
    assert (matched.kept & ~base.kept).sum() > 20


@pytest.mark.parametrize("select", [random_sample.select, partial(variants.select, name="cluster-core"),
                                    random_sample.select_of_lengths])
def test_a_budget_of_tokens(setting, select):
    base = setting.base
    wanted = int(base.num_tokens[base.kept].sum())
    plan = select(setting, Budget(72, wanted), 3)
    samples_at_a_time = K if select.__class__ is partial else 1
    away = abs(int(plan.num_tokens[plan.kept].sum()) - wanted)
    assert away <= 0.5 * samples_at_a_time * base.num_tokens.max() and plan.kept.sum() != 72


def entry(arm, seed, losses, point="", **more):
    losses = np.asarray(losses, dtype=float)
    sources = ["a", "b"] * (len(losses) // 2)
    facts = {} if arm == "untrained" else {
        "kept": 5, "num_samples": 10, "num_supervised_tokens": 100, "num_tokens": 300, "steps": 2, "training_seconds": 2.0,
        "cost": {"seconds": 1.0}, "folder": f"runs/seed-{seed}/{arm}",
    }
    return {
        "point": point, "arm": arm, "seed": seed, "match": "samples", "validation": {"sample_mean": losses.mean() + 0.1},
        "test": {"sample_mean": losses.mean()}, "sources": {"a": losses[::2].mean(), "b": losses[1::2].mean()},
        "test_losses": losses.tolist(), "test_sources": sources, **facts, **more,
    }


def test_tables_pair_by_seed_and_example(tmp_path):
    rng = np.random.default_rng(0)
    noise = [rng.normal(0, 0.5, 40) for _ in range(3)]
    entries = [entry("untrained", 0, 3 + noise[0])]
    for seed in range(3):
        entries += [
            entry("random", seed, 2 + noise[seed]), entry("cluster", seed, 1.9 + noise[seed] + rng.normal(0, 0.01, 40)),
            entry("cluster-core", seed, 2 + noise[seed] + rng.normal(0, 0.2, 40)),
        ]
    found = differences(entries)
    assert found["cluster"].mean == pytest.approx(-0.1, abs=0.01) and found["cluster"].verdict == "lower"
    assert found["cluster-core"].verdict == "no difference seen" and "random" not in found
    scores = tmp_path / "runs" / "seed-1" / "cluster" / "eval" / "humaneval"
    scores.mkdir(parents=True)
    (scores / "results.json").write_text(json.dumps({"scores": {"humaneval": {"value": 0.25, "n": 164}}}))
    tried = scores.with_name("humaneval_first_10")  # with --limit 10: no second seed
    tried.mkdir()
    (tried / "results.json").write_text(json.dumps({"scores": {"humaneval": {"value": 0.6, "n": 10}}}))
    tables = tables_of(entries, tmp_path)
    text = markdown(tables)
    assert [title.partition(":")[0] for title, *_ in tables] == [
        "Arms, equal in samples", "Test loss by source, in brackets the interval of the difference from random",
        "Benchmarks, %",
    ]
    line = next(line for line in text.splitlines() if line.startswith("| cluster |"))
    assert "| 1.0 | 2.0 | 3.0 |" in line and line.endswith("| lower |")
    assert "| arm | humaneval (n = 164) |" in text and "| cluster | 25.0 |" in text and "no difference seen" in text
    html = page(tables, entries)
    assert html.count("<table>") == 3 and '"name":"lower"' in html and not re.search('(src|href)="[^#]', html.split("<script>")[0])


def test_the_validation_half_decides_a_sweep(tmp_path):
    entries = [
        entry("cluster", 0, [2.0, 2.2] * 5, "train.lr=1", validation={"sample_mean": 1.0}),
        entry("cluster", 0, [1.0, 1.2] * 5, "train.lr=2", validation={"sample_mean": 1.5}),
    ]
    title, header, rows = tables_of(entries, tmp_path)[-1]
    assert title.startswith("Validation loss over the sweep") and header == ["arm", "train.lr=1", "train.lr=2", "least at", "test"]
    assert rows == [["cluster", "1.0000", "1.5000", "train.lr=1", "2.1000"]]


def test_what_cannot_be_compared_is_refused_at_once():
    recipe = load_recipe("tiny")
    bare = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"held_out": None})})
    with pytest.raises(ValueError, match="needs held-out rows: name evaluate.held_out"):
        require_comparable(Comparison([Point("", bare)], ["random"], [0], "samples", False))
    with pytest.raises(ValueError, match="s2l needs a small model: name baselines.s2l.model.name_or_path"):
        other = load_recipe("tiny", ["baselines.s2l.model=null"])
        require_comparable(Comparison([Point("", other)], ["s2l"], [0], "samples", False))
    with pytest.raises(ValueError, match="there is no clustre; there are full, random"):
        arms_of("random,clustre")
    assert arms_of("all") == list(ARMS) and arms_of("random,random") == ["random"]


ARGUMENTS = [
    "--recipe", "tiny", "--arms", "random,cluster", "--seeds", "0", "--keep", "0.3", "--output_dir", "compared", "--set",
    "train.epochs=1", "--set", "selection.num_restarts=2",
]


def arguments(*more):
    return [*ARGUMENTS, *more]


@pytest.mark.distributed
def test_killed_in_a_run_it_continues(tmp_path):
    output, results = tmp_path / "out.txt", tmp_path / "compared" / "results.jsonl"
    process = start("compare.py", arguments, tmp_path, output)
    deadline = time.monotonic() + 280
    while time.monotonic() < deadline and process.is_alive():
        done = [e["arm"] for e in read_lines(results)]
        if "random" in done and "[train] step 1/" in output.read_text().rpartition("[compare] cluster, seed 0")[2]:
            break
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    assert finish(process) == -signal.SIGKILL
    assert [e["arm"] for e in read_lines(results)] == ["untrained", "random"]
    first = read_lines(results)

    assert finish(start("compare.py", arguments, tmp_path, output)) == 0, output.read_text()
    entries = read_lines(results)
    assert entries[:2] == first and [e["arm"] for e in entries] == ["untrained", "random", "cluster"]
    assert entries[1]["kept"] == entries[2]["kept"] and entries[1]["steps"] == entries[2]["steps"] == 6
    assert entries[2]["test"]["sample_mean"] < entries[0]["test"]["sample_mean"]
    assert "| cluster | 1 |" in (tmp_path / "compared" / "comparison.md").read_text()
    assert not (tmp_path / "compared" / "runs" / "seed-0" / "random" / "model").exists()

    assert finish(start("compare.py", partial(arguments, "--set", "train.lr=5e-4"), tmp_path, output)) == 2
    assert "results.jsonl holds random, seed 0 of other settings, data or another model" in output.read_text()

    swept = partial(arguments, "--output_dir", "swept", "--sweep", "selection.keep=0.2,0.9")
    assert finish(start("compare.py", swept, tmp_path, output)) == 2
    assert "error: selection.keep 0.9 needs" in output.read_text() and not (tmp_path / "swept" / "results.jsonl").exists()
