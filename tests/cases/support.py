"""What the cases share: a recipe over the tiny model, run in this process up to the plan."""

from pathlib import Path

from cluster_ds.distributed import Ranks
from cluster_ds.prepare import prepare, prepare_tokens
from cluster_ds.recipe_file import load_recipe

INPUTS = Path(__file__).parent / "inputs"


def recipe_for(source, *overrides: str, template: str, **data):
    """The tiny recipe on another source; `source` is a name in inputs/ or a path."""
    path = source if Path(source).is_absolute() else INPUTS / source
    settings = [f"data.path={path}", f"data.template={template}", *(f"data.{k}={v}" for k, v in data.items()), *overrides]
    return load_recipe("tiny", settings)


def prep(folder: Path, source, *overrides: str, template: str = "alpaca", **data):
    """Read, tokenise and audit; the token table, or the refusal as ValueError."""
    return prepare_tokens(recipe_for(source, *overrides, template=template, **data), folder / "run", Ranks(0, 1, 0))


def plan_of(folder: Path, source, *overrides: str, template: str = "alpaca", **data):
    """Everything up to the plan."""
    return prepare(recipe_for(source, *overrides, template=template, **data), folder / "run", Ranks(0, 1, 0))


def texts(table, tokenizer):
    """(prompt, supervised) of each sample, decoded."""
    out = []
    for i in range(len(table)):
        sample = table[i]
        learnt = sample["labels"] != -100
        parts = (sample["input_ids"][~learnt], sample["input_ids"][learnt])
        out.append(tuple(tokenizer.decode(p.tolist(), clean_up_tokenization_spaces=False) for p in parts))
    return out
