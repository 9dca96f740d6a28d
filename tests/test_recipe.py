import shutil

import pytest
import yaml

from cluster_ds.recipe import Recipe
from cluster_ds.recipe_file import RECIPES_DIR, available_recipes, load_recipe

MINIMAL = """\
model:
  name_or_path: some/model
data:
  path: some/data
  template: alpaca
  max_length: 128
train:
  epochs: 1
  global_batch_size: 8
  micro_batch_size: 2
  lr: 5e-5
"""


def write(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_minimal_recipe(tmp_path):
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert recipe.name == "mine"
    assert recipe.train.lr == 5e-5  # YAML 1.1 would read this as text
    assert recipe.selection.alpha == 1.5 and recipe.selection.choice == "peripheral"


@pytest.mark.parametrize("name", available_recipes())
def test_shipped_recipes_load_and_survive_saving(name, tmp_path):
    recipe = load_recipe(name)
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe


def test_every_recipe_has_a_job_script():
    assert all((RECIPES_DIR / f"{name}.sh").is_file() for name in available_recipes())


def test_overrides(tmp_path):
    path = write(tmp_path, MINIMAL)
    recipe = load_recipe(path, ["selection.ratio=0.5", "train.lr=1e-4", "data.columns={instruction: q}"])
    assert recipe.selection.ratio == 0.5 and recipe.train.lr == 1e-4 and recipe.data.columns == {"instruction": "q"}
    assert load_recipe(path, ["selection.ratio=0.5", "selection.keep=0.3"]).selection.ratio is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("  lr: 5e-5", "  learning_rat: 5e-5"), r"mine.yaml:11: unknown key train.learning_rat; did you mean"),
        (("train:", "trian:"), r"mine.yaml:7: unknown key trian; did you mean train\?"),
        (("  lr: 5e-5", "  lr: fast"), r"mine.yaml:11: train.lr: .*number.*\(got 'fast'\)"),
        (("  epochs: 1", "  epochs: true"), r"mine.yaml:8: train.epochs: .*integer.*\(got True\)"),
        (("  epochs: 1", "  epochs: 0"), r"mine.yaml:8: train.epochs: .*greater than or equal to 1"),
        (("  template: alpaca", "  template: alpacca"), r"mine.yaml:5: data.template: .*'alpaca'.*\(got 'alpacca'\)"),
        (("  lr: 5e-5", "  lr: 5e-5\n  lr: 1e-5"), r"mine.yaml:12: train.lr is given twice"),
        (("  max_length: 128\n", ""), r"data.max_length is missing"),
        (("  lr: 5e-5", "  lr: 5e-5\nselection:\n  ratio: 0.5\n  keep: 0.2"), r"ratio \(0.5\) and keep \(0.2\)"),
        (("  lr: 5e-5", "  lr: ["), r"is not valid YAML"),
    ],
)
def test_mistakes_are_named_with_file_and_line(tmp_path, change, message):
    assert change[0] in MINIMAL
    with pytest.raises(ValueError, match=message):
        load_recipe(write(tmp_path, MINIMAL.replace(*change)))


def test_mistaken_override_names_itself(tmp_path):
    with pytest.raises(ValueError, match=r"--set selection.rato=1: unknown key selection.rato; did you mean selection.ratio\?"):
        load_recipe(write(tmp_path, MINIMAL), ["selection.rato=1"])
    with pytest.raises(ValueError, match="expected section.key=value"):
        load_recipe(write(tmp_path, MINIMAL), ["selection.ratio"])


def test_all_problems_at_once(tmp_path):
    text = MINIMAL.replace("epochs: 1", "epochs: x").replace("max_length: 128", "max_length: y")
    with pytest.raises(ValueError) as error:
        load_recipe(write(tmp_path, text))
    assert "data.max_length" in str(error.value) and "train.epochs" in str(error.value)


def test_misspelt_recipe_names_the_nearest(tmp_path, monkeypatch):
    import cluster_ds.recipe_file as module

    shutil.copy(RECIPES_DIR / "tiny.yaml", tmp_path / "magicoder_7b.yaml")
    monkeypatch.setattr(module, "RECIPES_DIR", tmp_path)
    with pytest.raises(ValueError, match="no recipe named 'magicodr': did you mean magicoder_7b?"):
        load_recipe("magicodr")
    with pytest.raises(ValueError, match="recipe file .*nowhere.yaml does not exist"):
        load_recipe("nowhere.yaml")


def test_resolved_recipe_is_complete():
    saved = yaml.safe_load(load_recipe("tiny").to_yaml())
    assert set(saved) == set(Recipe.model_fields)
    assert saved["train"]["max_grad_norm"] == 1.0  # defaults are written down


def test_held_out_rows_are_read_as_the_training_rows_but_for_their_revision():
    settings = ["data.path=own/a", "data.revision=abc", "data.subset=x", "data.format=alpaca", "data.columns={response: answer}"]
    other = load_recipe("tiny", [*settings, "evaluate.held_out=own/b"]).held_out["data"]
    assert (other.path, other.revision, other.subset, other.columns) == ("own/b", None, None, {"response": "answer"})
    same = load_recipe("tiny", [*settings, "evaluate.held_out=own/a", "evaluate.held_out_split=test"]).held_out["data"]
    assert (same.revision, same.subset, same.split) == ("abc", "x", "test")
    own = load_recipe("tiny", [*settings, "evaluate.held_out={path: c.jsonl, format: messages}"]).held_out["data"]
    assert (own.path, own.format, own.columns) == ("c.jsonl", "messages", {})


@pytest.mark.parametrize("overrides", [[], ["data.path=null", "data.sources={a: {path: a.jsonl}, b: {path: b, split: dev}}"],
                                       ["model.lora={rank: 4}", "evaluate.held_out={path: c.jsonl}", "selection.keep=0.3"]])
def test_the_recipe_that_is_saved_with_a_run_can_be_loaded(tmp_path, overrides):
    recipe = load_recipe("tiny", overrides)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert load_recipe(str(tmp_path / "recipe.yaml")) == recipe
