"""Analyses of a small run of real stages, against plain computations and hand-worked cases."""

import csv
import json
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cluster_ds.analysis import batch_variance, compared, describing, gradients, selectors, semantic
from cluster_ds.analysis.__main__ import _rows, main
from cluster_ds.analysis.runs import Output, read_run
from cluster_ds.distributed import Ranks
from cluster_ds.embedded import byte_tokenizer
from cluster_ds.prepare import prepare
from cluster_ds.recipe_file import load_recipe

from .conftest import tiny_llama
from .test_comparison import entry

RECIPE = """\
model: {{name_or_path: {folder}/model}}
data:
  sources: {{sums: {{path: {folder}/sums.jsonl}}, words: {{path: {folder}/words.jsonl}}}}
  template: plain
  max_length: 120
selection: {{num_clusters: 3, min_fraction: 0.4, keep: 0.4, tokens_per_batch: 1024, num_restarts: 3}}
train: {{epochs: 1, global_batch_size: 6, micro_batch_size: 2, lr: 1e-3, precision: fp32}}
deepspeed: {{config: cpu}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("analysis"), np.random.default_rng(0)
    tiny_llama(vocab_size=259).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    pairs = rng.integers(0, 99, (40, 2)).tolist()
    sums = [{"instruction": f"add {a} and {b}", "output": str(a + b)} for a, b in pairs]
    words = [{"instruction": f"spell {n}", "output": " ".join(rng.choice(list("abcxyz"), n))} for n in range(3, 33)]
    for name, rows in (("sums", sums), ("words", words)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    recipe = load_recipe(str(folder / "recipe.yaml"))
    prepare(recipe, folder / "run", Ranks(0, 1, 0))
    (folder / "run" / "recipe.yaml").write_text(recipe.to_yaml())
    return read_run(folder / "run")


def test_the_permutation_test_is_the_exact_one_where_all_can_be_counted():
    """Six samples in two clusters of three: 20 ways to deal the labels, each the same as its mirror."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(6, 4)) + np.repeat([[1.0, 0, 0, 0], [0, 0.5, 0, 0]], 3, axis=0)
    cosines = gradients.cosines_of(x @ x.T)

    def statistic(first):
        labels = np.isin(np.arange(6), first)
        pairs = list(combinations(range(6), 2))
        inside = [cosines[a, b] for a, b in pairs if labels[a] == labels[b]]
        return np.mean(inside) - np.mean([cosines[a, b] for a, b in pairs if labels[a] != labels[b]])

    found = gradients.permutation_test(cosines, np.repeat([0, 1], 3), seed=0)
    assert found.statistic == pytest.approx(statistic([0, 1, 2])) == pytest.approx(found.inside - found.across)
    every = np.array([statistic(first) for first in combinations(range(6), 3)])
    exact = (every >= found.statistic - 1e-12).mean()
    assert abs(found.p_value - exact) < 4 * np.sqrt(exact * (1 - exact) / found.num_permutations) + 1e-3


def test_sketches_are_the_gradients_and_their_error_is_what_is_said(run):
    rows = run.usable[:12]
    model = tiny_llama(vocab_size=259)
    reference = tiny_llama(vocab_size=259).double()
    full = []
    for row in rows:
        sample = run.samples.tokens[int(row)]
        ids, labels = (torch.from_numpy(sample[k]) for k in ("input_ids", "labels"))
        loss = F.cross_entropy(reference(input_ids=ids[None]).logits[0, :-1], labels[1:], ignore_index=-100)
        full.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(reference.parameters()))]).numpy())
    exact = gradients.cosines_of(np.stack(full) @ np.stack(full).T)
    sketches = gradients.sketches_of(model, run.samples.tokens, rows, 10**7, 0).astype(np.float64)
    assert sketches.shape == (12, full[0].size)  # nothing is compressed
    assert np.abs(gradients.cosines_of(sketches @ sketches.T) - exact).max() < 1e-5
    assert np.abs(gradients.exact_cosines(model, run.samples.tokens, rows[:3]) - exact[:3, :3]).max() < 1e-5
    small = gradients.sketches_of(model, run.samples.tokens, rows, 2003, 0).astype(np.float64)
    errors = (gradients.cosines_of(small @ small.T) - exact)[np.triu_indices(12, 1)]
    assert small.shape == (12, 2003) and 0 < np.sqrt((errors**2).mean()) < 1.5 * np.sqrt(2 / 2003)


def test_gradients_of_a_run(run):
    numbers = gradients.analyse(run, 30, seed=1, size=4001)
    assert numbers["num_samples"] == 30 and numbers["num_pairs_checked"] == 15
    assert numbers["sketch_largest_error_of_pairs"] < 6 * numbers["sketch_standard_error_of_a_cosine"]
    assert 0 < numbers["p_value"] <= 1 and len(numbers["mean_cosines_of_clusters"]) == 3
    saved = json.loads((run.folder / "analysis" / "gradients.json").read_text())
    assert saved["statistic"] == numbers["statistic"]
    assert "<svg" in (run.folder / "analysis" / "gradients.svg").read_text()


def test_diversity_of_known_vectors():
    assert selectors.scaled_diversity(np.eye(7)) == pytest.approx(7)
    assert selectors.scaled_diversity(np.ones((7, 3))) == pytest.approx(1)
    assert selectors.scaled_diversity(np.array([[3.0, 0], [0, 4]])) == pytest.approx(2 * 25 / 25)


def test_selectors(run):
    chosen = selectors.selections(run, 0)
    assert {len(rows) for draws in chosen.values() for rows in draws} == {int(run.plan.kept.sum())}
    assert np.array_equal(chosen["peripheral"][0], np.flatnonzero(run.plan.kept))
    numbers = selectors.analyse_diversity(run, 0, num_true=6)
    assert set(numbers["selectors"]) == set(chosen)
    core, outer = (numbers["selectors"][name]["unit proxies"]["mean"] for name in ("core", "peripheral"))
    assert outer > core and numbers["selectors"]["core"]["true gradients"]["num_samples"] == 6
    found = selectors.analyse_centroids(run, 0)["selectors"]["this plan"]
    for c in range(3):
        mine = run.plan.cluster == c
        a, b = run.unit[mine].mean(axis=0), run.unit[mine & run.plan.kept].mean(axis=0)
        assert found["distance"][c] == pytest.approx(np.sqrt(((a - b) ** 2).sum()), rel=1e-5)
        assert found["cosine"][c] == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), rel=1e-5)


def test_composition_adds_up(run):
    groups = describing.analyse_composition(run)["groups"]
    for kind in ("cluster", "source"):
        parts = [entry for name, entry in groups.items() if name.startswith(kind)]
        for what in ("samples", "kept", "tokens", "kept_supervised_tokens"):
            assert sum(part[what] for part in parts) == groups["all"][what]
    assert groups["source sums"]["samples"] == 40 and groups["all"]["kept"] == int(run.plan.kept.sum())


def test_projection_and_missing_cosines(run):
    numbers = describing.analyse_projection(run, 0)
    assert len(numbers["pca"]) == len(numbers["tsne"]) == len(numbers["cluster"]) == len(run.usable)
    centred = run.unit - run.unit.mean(axis=0)
    largest = np.linalg.svd(centred, compute_uv=False)[0] ** 2
    assert (np.array(numbers["pca"])[:, 0] ** 2).sum() == pytest.approx(largest, rel=1e-3)
    with pytest.raises(ValueError, match="has no cosines of ranks: train on two ranks or more with train.diagnose_every"):
        describing.analyse_worker_cosine(run)
    lines = [{"step": s, "rank_cosine": c, "standard_error": 0.0} for s, c in ((5, 0.5), (10, 0.1))]
    (run.folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 11}]))
    assert describing.analyse_worker_cosine(run)["mean"] == pytest.approx(0.3)


def test_variance_predicted_and_measured(run):
    arms = batch_variance.analyse(run, 600)["arms"]
    assert set(arms) == {"random", "equal", "proportional", "neyman"}
    for found in arms.values():
        assert abs(found["measured"] - found["predicted"]) < 4 * found["standard_error"]


def test_the_sheet_is_labelled_and_read_back(run):
    assert semantic.agreement(np.array([0, 0, 0, 1, 1]), np.array([5, 5, 2, 2, 2])) == pytest.approx(4 / 5)
    path = semantic.write_sheet(run, 30, 0)
    with pytest.raises(ValueError, match="is there already: fill its column 'label'"):
        semantic.write_sheet(run, 30, 0)
    with pytest.raises(ValueError, match="none of 30 samples has a label"):
        semantic.read_sheet(run, path, 0)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 30 and all("cluster" not in row for row in rows) and rows[0]["prompt"]
    for row in rows[:-1]:
        row["label"] = row["prompt"].split()[0]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    numbers = semantic.read_sheet(run, path, 0)
    clusters = run.plan.cluster[[run.plan.ids.index(row["sample_id"]) for row in rows[:-1]]]
    counts = [[sum((clusters == c) & (np.array([r["label"] for r in rows[:-1]]) == name)) for name in ("add", "spell")]
              for c in range(3)]
    assert numbers["agreement"] == pytest.approx(sum(max(pair) for pair in counts) / 29)
    assert numbers["num_labelled"] == 29 and numbers["expected_by_chance"] < numbers["agreement"] + 1e-9


def test_costs_and_sweeps_of_a_comparison(tmp_path):
    cost = {"forwards": 10, "backwards": 0, "small_forwards": 0, "small_backwards": 0, "seconds": 2.0}
    noise = np.random.default_rng(0).normal(size=10)
    entries = [entry("untrained", 0, noise)]
    for point, shift in (("selection.ratio=1", 0.0), ("selection.ratio=0.5", 0.5)):
        entries.append(entry("random", 0, 2 + noise, point, cost={**cost, "forwards": 0, "seconds": 0.0}))
        entries.append(entry("cluster", 0, 2 + shift + noise, point, cost=cost))
        entries.append(entry("less", 0, 2 + noise, point, cost={**cost, "backwards": 40, "seconds": 30.0}))
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    numbers = compared.analyse_cost(Output(tmp_path))
    assert numbers["arms"]["less"]["backwards"] == 40 and numbers["seconds_over_cluster"]["less"] == pytest.approx(15)
    curves = compared.analyse_sensitivity(Output(tmp_path))["arms"]
    assert [e["test_loss"] for e in curves["cluster"]] == pytest.approx([2 + noise.mean(), 2.5 + noise.mean()])
    assert curves["cluster"][1]["verdict"] == "higher" and curves["random"][0]["minus_random"] is None
    with pytest.raises(ValueError, match="holds no finished comparison"):
        compared.results_of(tmp_path / "elsewhere")


def test_numbers_become_rows():
    numbers = {"a": 1, "b": {"c": 0.123456789, "d": [1, 2.5]}, "long": list(range(30)), "e": [{"x": "y"}]}
    assert list(_rows(numbers)) == [("a", "1"), ("b.c", "0.12346"), ("b.d", "1, 2.5"), ("e.0.x", "y")]


def test_the_command_line(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["analysis", "composition", str(run.folder)])
    main()
    assert "composition.json, composition.svg" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["analysis", "composition", str(run.folder.parent)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2 and "error: no plan at" in capsys.readouterr().err
