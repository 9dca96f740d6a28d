"""Reports: what they say against the plan and the log, and that a browser shows them from disk without a network."""

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster_ds.distributed import Ranks
from cluster_ds.embedded import byte_tokenizer
from cluster_ds.evaluation.command import _show_in_run
from cluster_ds.files import write_json
from cluster_ds.prepare import prepare
from cluster_ds.recipe_file import load_recipe
from cluster_ds.report import selection, training
from cluster_ds.report.page import document, figure, hover_text, join, paragraph, table
from cluster_ds.report.terms import telling_terms
from cluster_ds.report.view import View

from .browser import CHROMIUM, SCHEMES, WIDTHS, opened, show_everything, wait_until
from .conftest import ROOT, tiny_llama

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install one, or name it in $CHROMIUM")
HOSTILE = "</script><script>document.title='taken'</script><img src=https://example.org/x.png>"
RECIPE = """\
model: {{name_or_path: {folder}/model}}
data:
  sources: {{sums: {{path: {folder}/sums.jsonl}}, words: {{path: {folder}/words.jsonl}}}}
  template: plain
  max_length: 160
selection: {{num_clusters: {k}, alpha: 1.2, min_fraction: 0.4, keep: 0.4, tokens_per_batch: 8192, num_restarts: 3}}
train: {{epochs: 1, global_batch_size: 8, micro_batch_size: 2, lr: 1e-3, precision: fp32}}
deepspeed: {{config: cpu}}
"""


def prepared_run(folder: Path, num_rows: int, k: int = 4):
    """A selection from sums and spelt words, through all real stages, with its recipe and folder."""
    rng = np.random.default_rng(0)
    tiny_llama(vocab_size=259, max_position_embeddings=256).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    pairs, lengths = rng.integers(0, 999, (num_rows * 3 // 4, 2)).tolist(), rng.integers(3, 25, num_rows // 4)
    sums = [{"instruction": f"please add {a} and {b}", "output": f"total {a + b}"} for a, b in pairs]
    words = [{"instruction": f"spell letters {n}", "output": " ".join(rng.choice(list("abcxyz"), n))} for n in lengths]
    words[0]["output"] = HOSTILE
    for name, rows in (("sums", sums), ("words", words)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, k=k))
    recipe = load_recipe(str(folder / "recipe.yaml"))
    return recipe, prepare(recipe, folder / "run", Ranks(0, 1, 0)), folder / "run"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return prepared_run(tmp_path_factory.mktemp("small"), 240)


@pytest.fixture(scope="module")
def report(small) -> Path:
    return selection.write_selection_report(*small, world_size=2)


def log_entry(step: int, loss: float, **more):
    return {
        "step": step, "epoch": 0, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 100.0, "mfu": None,
        "data_wait_s": 0.1, "seconds": 2.0, "num_samples": 8, "cluster_loss": [loss, None, loss, loss],
        "predicted_skew": 1.1, "skew": 1.2, "tokens_per_s_per_rank": 50.0, **more,
    }


@pytest.fixture(scope="module")
def trained(small) -> Path:
    """The report of a run whose log is written down by hand: 12 steps, 2 s each."""
    recipe, prepared, folder = small
    num_steps = -(-int(prepared.plan.kept.sum()) // 8)
    entries = [log_entry(s, 4.0 - 0.1 * s, rank_cosine=0.5, gradient_diversity=0.2, num_gradients=6) for s in range(1, num_steps + 1)]
    (folder / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    (folder / "held_out.jsonl").write_text(json.dumps({"step": 5, "sample_mean": 3.25}) + "\n")
    spike = {"step": 7, "loss": 9.5, "usual": 3.3, "deviation": 0.1, "samples": [{"id": "abc-0", "loss": 20.0, "cluster": 1}]}
    (folder / "spikes.jsonl").write_text(json.dumps(spike) + "\n")
    write_json(folder / "summary.json", {
        "steps": num_steps, "world_size": 2, "seconds": {"tokens": 1.0, "proxies": 0.0, "plan": 2.0, "training": 30.0}, "model": "the/model",
        "held_out_before": {"sample_mean": 4.5}, "held_out_after": {"sample_mean": 2.25},
        "prediction": {"steps_predicted": 30.0, "steps_measured": 24.0, "extraction_predicted": 3.0, "extraction_measured": 0.0},
    })  # fmt: skip
    (folder / "eval" / "humaneval").mkdir(parents=True)
    score = {"value": 0.25, "n": 164, "interval_95": [0.19, 0.32]}
    write_json(folder / "eval" / "humaneval" / "results.json", {"scores": {"humaneval": score}})
    return training.write_training_report(recipe, prepared.plan, prepared.model_folder, folder)


def figures_of(html: str) -> list[dict]:
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)]


def test_the_selection_report_says_what_the_plan_says(small, report):
    _, prepared, _ = small
    plan, m = prepared.plan, prepared.plan.manifest
    html = report.read_text()
    sizes, points, *histograms = figures_of(html)
    bars = {trace["name"]: trace["y"] for trace in sizes["data"] if trace["type"] == "bar"}
    assert bars["nearest centroid, no bounds"] == m["nearest_sizes"] != m["sizes"]  # a bound binds
    assert bars["within the bounds"] == m["sizes"] and bars["kept"] == m["counts"]
    assert bars["equal parts"] == [min(m["sizes"])] * 4
    assert [t["y"][0] for t in sizes["data"] if t["type"] == "scatter"] == [m["cap"], m["floor"]]
    of_map = {(t["legendgroup"], t["marker"]["symbol"]): len(t["x"]) for t in points["data"]}
    for c in range(4):
        mine = plan.cluster == c
        assert of_map[str(c), "circle"] == (mine & plan.kept).sum() and of_map[str(c), "circle-open"] == (mine & ~plan.kept).sum()
    cut = histograms[0]["layout"]["shapes"][0]["x0"]
    assert cut == pytest.approx(plan.distance[plan.kept & (plan.cluster == 0)].min(), rel=1e-4)
    assert sum(map(sum, (t["y"] for t in histograms[0]["data"]))) == m["sizes"][0]
    assert plan.hash in html and m["provenance"]["tokens"] in html
    assert f"Correlation of distance with supervised tokens: {m['distance_length_correlation']:+.2f}" in html
    assert "180 rows read as alpaca" in html and "60 rows read as alpaca" in html


def test_what_a_cluster_is_about(small):
    recipe, prepared, folder = small
    view, sources = View(recipe, prepared, folder, 1), np.array(prepared.plan.source)
    told = set()
    for c, title in enumerate(view.titles):
        mostly = Counter(sources[prepared.plan.cluster == c]).most_common(1)[0][0]
        if (sources[prepared.plan.cluster == c] == mostly).mean() > 0.9:
            assert ({"sums": "total", "words": "spell"}[mostly]) in title, title
            told.add(mostly)
    assert told == {"sums", "words"}
    assert view.text(0).startswith("please add")


def test_telling_terms_by_hand():
    texts = ["apple common"] * 30 + ["pear common"] * 30 + ["pear common rare"] + ["common"] * 30
    clusters = np.repeat([0, 1, 2], [30, 31, 30])
    assert telling_terms(texts, clusters, 3)[:2] == [["apple"], ["pear"]]  # "rare" stands in one sample alone
    assert telling_terms(["1 2", "3 4"], np.array([0, 1]), 2) == [[], []]
    assert telling_terms(["word", "word"], np.array([0, 0]), 1) == [[]]


def test_a_plan_has_one_report_until_it_changes(small, report):
    before = report.stat().st_mtime_ns
    assert selection.write_selection_report(*small, world_size=2) == report and report.stat().st_mtime_ns == before
    selection.write_selection_report(*small, world_size=4)
    assert report.stat().st_mtime_ns > before and "rank 3" in report.read_text()
    selection.write_selection_report(*small, world_size=2)


def test_what_the_page_speaks_of_changes_it(small, report, tmp_path):
    """A probe made after it, other settings of training; a finished run's page stays."""
    recipe, prepared, folder = small
    before = report.read_text().splitlines()[0]
    other = recipe.model_copy(update={"train": recipe.train.model_copy(update={"allocation": "tokens"})})
    html = selection.write_selection_report(other, prepared, folder, world_size=2).read_text()
    assert html.splitlines()[0] != before and "allocation tokens (this recipe" in html
    (folder / "model").mkdir()
    write_json(folder / "model" / "manifest.json", {})
    selection.write_selection_report(*small, world_size=4)
    assert report.read_text() == html
    (folder / "model" / "manifest.json").unlink()
    (folder / "model").rmdir()
    selection.write_selection_report(*small, world_size=2)


def test_a_recipe_that_cannot_train_on_it_is_said_in_the_page(small, tmp_path):
    recipe, prepared, _ = small
    html = selection.write_selection_report(recipe, prepared, tmp_path, world_size=3).read_text()
    assert "This recipe cannot train on it with 3 ranks: global_batch_size 8 is not a multiple" in html


def test_a_cluster_of_points_at_one_distance(small):
    recipe, prepared, folder = small
    distance = np.where(prepared.plan.cluster == 3, 0.5, prepared.plan.distance)
    distance[np.argmax(prepared.plan.cluster == 3)] = np.nextafter(0.5, 1)
    changed = replace(prepared, plan=replace(prepared.plan, distance=distance))
    *_, histogram = [f for f in figures_of(selection._page(View(recipe, changed, folder, 2))) if "bargap" in f["layout"]]
    assert sum(map(sum, (t["y"] for t in histogram["data"]))) == (prepared.plan.cluster == 3).sum()


def test_a_page_that_fails_ends_no_run(capsys):
    from cluster_ds.runs import report as make

    def fail() -> Path:
        raise KeyError("bias")

    make(fail, Ranks(0, 1, 0))
    assert "[report] warning: a page could not be made (KeyError: 'bias'); the run is not touched" in capsys.readouterr().out
    with pytest.raises(OSError):
        make(lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")), Ranks(0, 1, 0))


def test_an_early_end_changes_no_rate(small, trained):
    """Half of the steps in the log, at the same seconds each: the same time for all the data."""
    recipe, prepared, folder = small

    def of_full(html: str) -> float:  # seconds
        value, unit = re.search(r"<td>full</td><td>(\S+) (s|min)</td>", html).groups()
        return float(value) * {"s": 1, "min": 60}[unit]

    whole = of_full(trained.read_text())
    lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    (folder / "log.jsonl").write_text("".join(lines[: len(lines) // 2]))
    html = training.write_training_report(recipe, prepared.plan, prepared.model_folder, folder).read_text()
    assert of_full(html) == pytest.approx(whole, rel=0.2)
    html = training.write_training_report(recipe, prepared.plan, prepared.model_folder, folder, cut_short="loss nan").read_text()
    steps = len(lines) // 2
    assert f"Cut short behind step {steps} of {len(lines)}: loss nan." in html and "The model: none yet" in html
    (folder / "log.jsonl").write_text("")
    assert training.write_training_report(recipe, prepared.plan, prepared.model_folder, folder) is None
    (folder / "log.jsonl").write_text("".join(lines))
    training.write_training_report(recipe, prepared.plan, prepared.model_folder, folder)


def test_text_cannot_become_markup(report):
    html = report.read_text()
    assert HOSTILE not in html and "<img" not in html.split("<script>")[0]
    assert hover_text("a<b\n\nc" + "d" * 100, most=80, width=40) == "a&lt;b<br><br>c" + "d" * 39 + "<br>" + "d" * 35 + "…"
    assert hover_text("数" * 300, most=80, width=100) == "数" * 40 + "…" and hover_text("ab", most=2) == "ab"
    assert "&lt;b&gt;" in table(["<b>"], [["<b>"]]) and "<b>" not in paragraph("<b>")
    spec = figures_of(document("t", join([figure([{"x": [1.0, float("nan")], "text": ["</script>"]}])]), []))[0]
    assert spec["data"][0] == {"x": [1.0, None], "text": ["</script>"]}


def test_the_command_can_be_typed_again(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["launch/train.py", "--local_rank=0", "--recipe", "my recipe.yaml", "--stop_file", "/tmp/stop"])
    for name, value in (("WORLD_SIZE", "16"), ("LOCAL_SIZE", "8")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    words = "launch/train.py --recipe 'my recipe.yaml'"
    assert selection._command() == f"cd {tmp_path}\ndeepspeed --num_gpus 8 --num_nodes 2 {words}"
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert selection._command().endswith(f"deepspeed --num_gpus 8 {words}")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("LOCAL_SIZE")
    assert selection._command().endswith(f"python {words}")


def test_a_page_without_figures_carries_no_script():
    assert "<script" not in document("t", paragraph("text"), []) and len(document("t", paragraph("text"), [])) < 5000


def test_the_training_report_says_what_the_log_says(small, trained):
    html = trained.read_text()
    losses, by_cluster, *_ = figures_of(html)
    assert losses["data"][0]["y"][:3] == [3.9, 3.8, 3.7] and losses["data"][2]["y"] == [3.25]
    assert losses["data"][1]["y"][:2] == pytest.approx([3.9, (0.9 * 0.1 * 3.9 + 0.1 * 3.8) / 0.19], abs=1e-4)
    assert by_cluster["data"][1]["y"][0] is None  # a cluster without a sample in any batch
    html = html.split("<script>")[0]  # without plotly
    for told in (">25.0<", "19.0 to 32.0", "1.25 x", "abc-0", "proxies</td><td>reused", ">4.5000<", ">2.2500<", "the/model"):
        assert told in html
    number = int(small[1].plan.kept.sum())
    assert f"<td>CluSTER</td><td>{2 * -(-number // 8)} s</td>" in html  # 2 s each step


def test_an_evaluation_puts_its_scores_into_the_page(small, trained, tmp_path, capsys):
    recipe, prepared, folder = small
    run = tmp_path / "run"
    shutil.copytree(folder, run, ignore=shutil.ignore_patterns("cache"))
    shutil.copytree(prepared.model_folder, run / "model")
    _show_in_run(run / "model")  # no whole model of a run yet
    assert capsys.readouterr().out == ""
    write_json(run / "model" / "manifest.json", {})
    (run / "recipe.yaml").write_text(recipe.to_yaml())
    (run / "eval" / "mbpp").mkdir()
    write_json(run / "eval" / "mbpp" / "results.json", {"scores": {"mbpp pass@1": {"value": 0.4125, "n": 378}}})
    _show_in_run(run / "model")
    assert capsys.readouterr().out == f"[report] {run / 'training.html'}\n"
    html = (run / "training.html").read_text().split("<script>")[0]
    assert ">41.2<" in html and ">25.0<" in html and "None yet" not in html


def hover_and_legend(page):
    """Hover over a point of the map, and hide a cluster by its name."""
    place = page.evaluate("""() => {const f = [...document.querySelectorAll('.figure')][1]; f.scrollIntoView({block: 'center'});
        const box = f.querySelector('.scatterlayer .point').getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2]}""")
    page.mouse.move(place[0] - 30, place[1] - 30)
    page.mouse.move(*place, steps=4)
    label = "[...document.querySelectorAll('.hoverlayer')].map(e => e.textContent).join('')"
    wait_until(page, f"() => /cluster \\d+, (kept|left out), distance \\d/.test({label})")
    visible = "() => [...document.querySelectorAll('.figure')][1].firstElementChild.data.map(t => t.visible ?? true)"
    assert set(page.evaluate(visible)) == {True}
    page.evaluate("""() => {const f = [...document.querySelectorAll('.figure')][1];
        f.querySelector('.legendtoggle').scrollIntoView({block: 'center'})}""")
    box = page.locator(".figure").nth(1).locator(".legendtoggle").first.bounding_box()
    page.mouse.click(box["x"] + 8, box["y"] + box["height"] / 2)
    wait_until(page, "() => [...document.querySelectorAll('.figure')][1].firstElementChild.data.some(t => t.visible == 'legendonly')")


@needs_browser
def test_a_browser_shows_the_reports(report, trained):
    pytest.importorskip("playwright")
    for file in (report, trained):
        for width in WIDTHS:
            for scheme in SCHEMES:
                with opened(file, width, scheme) as (page, problems):
                    show_everything(page)
                    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out of a phone
                    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
                    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 22, 26)")
                    assert page.title() != "taken"
                    if file is report:
                        hover_and_legend(page)
                    assert problems == []


@needs_browser
def test_another_scheme_draws_the_figures_anew(report):
    pytest.importorskip("playwright")
    color = "() => getComputedStyle(document.querySelector('.figure .xtick text')).fill"
    with opened(report) as (page, problems):
        page.wait_for_selector(".figure .xtick text")
        before = page.evaluate(color)
        page.emulate_media(color_scheme="dark")
        wait_until(page, f"before => ({color})() != before", before)
        assert problems == []


@needs_browser
def test_twenty_thousand_rows(tmp_path):
    """Of a random part of the rows in figures, said so, and of all rows in counts."""
    pytest.importorskip("playwright")
    recipe, prepared, folder = prepared_run(tmp_path, 20_000, k=8)
    file = selection.write_selection_report(recipe, prepared, folder, world_size=2)
    html = file.read_text()
    sizes, points, *_ = figures_of(html)
    assert sum(len(trace["x"]) for trace in points["data"]) == 4000 and "4,000 of 20,000 samples, drawn at random" in html
    assert sum(sizes["data"][1]["y"]) == 20_000
    assert file.stat().st_size < 8e6
    with opened(file) as (page, problems):
        show_everything(page)
        hover_and_legend(page)
        assert problems == []


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    """The finished run in $CLUSTER_DS_RUN, with its output beside it as NAME.out, or else `tiny`, which is run."""
    if "CLUSTER_DS_RUN" in os.environ:
        return Path(os.environ["CLUSTER_DS_RUN"]).resolve()
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    with folder.with_suffix(".out").open("w") as log:
        command = ["bash", ROOT / "recipes" / "tiny.sh", "--output_dir", folder]
        subprocess.run(command, check=True, timeout=900, stdout=log, stderr=subprocess.STDOUT)
    return folder


@needs_browser
@pytest.mark.slow
def test_the_reports_of_a_whole_run(whole_run):
    pytest.importorskip("playwright")
    for name in (selection.NAME, training.NAME):
        with opened(whole_run / name) as (page, problems):
            show_everything(page)
            if name == selection.NAME:
                hover_and_legend(page)
            assert problems == []


@pytest.mark.slow
def test_the_log_of_a_whole_job(whole_run):
    """Ours from the first line to the last, short, and nothing twice."""
    lines = whole_run.with_suffix(".out").read_text().splitlines()
    assert 30 < len(lines) < 120
    tagged = r"\[(run|tokens|memory|proxies|plan|report|held-out|train|census)\] \S|(  \S|\w+: summary$)|(converting|pretraining) "
    assert [line for line in lines if not re.match(tagged, line)] == []
    assert [line for line, count in Counter(lines).items() if count > 1] == []
