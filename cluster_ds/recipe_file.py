"""Stage 0: YAML + dotted overrides -> a Recipe.

Unknown or mistyped keys are refused with the nearest valid name, the file and the line, before anything is loaded.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from .recipe import Recipe

RECIPES_DIR = Path(__file__).resolve().parent.parent / "recipes"


class _Loader(yaml.SafeLoader):
    """YAML whose 5e-5 is a number (YAML 1.2), as every training recipe expects."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def available_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(p.stem for p in RECIPES_DIR.glob("*.yaml"))


def find_recipe(name_or_path: str) -> Path:
    """The YAML file of a recipe name or path.

    Raises:
        ValueError: naming the nearest recipes when there is none of that name.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or path.parent != Path("."):
        if not path.is_file():
            raise ValueError(f"recipe file {path} does not exist")
        return path
    shipped = RECIPES_DIR / f"{name_or_path}.yaml"
    if shipped.is_file():
        return shipped
    names = available_recipes()
    near = difflib.get_close_matches(name_or_path, names, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise ValueError(f"no recipe named {name_or_path!r}: {hint}Recipes: {', '.join(names)}; or give a path to a .yaml")


def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe and apply `section.key=value` overrides.

    Args:
        name_or_path: a shipped recipe's name, or the path of a YAML file.
        overrides: values are YAML, e.g. "selection.ratio=0.5".

    Raises:
        ValueError: all problems at once, each with its file and line and, for unknown keys, the nearest valid name.
    """
    path = find_recipe(name_or_path)
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path} holds no sections: a recipe begins with 'model:', 'data:', 'train:'")
    origin: dict[tuple[str, ...], str] = {}
    values = _construct(root, path, (), origin)
    for override in overrides or []:
        _apply_override(values, override, origin)
    if not isinstance(values.setdefault("name", path.stem), str):
        raise ValueError(f"{origin.get(('name',), path)}: name must be text")
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        problems = [_explain(dict(e), origin, str(path)) for e in error.errors()]
        raise ValueError("\n".join(dict.fromkeys(problems))) from None


def _construct(node: yaml.MappingNode, path: Path, prefix: tuple[str, ...], origin: dict) -> dict[str, Any]:
    """Mapping node -> dict, remembering where each key stands; a key given twice is refused."""
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, where = str(key_node.value), f"{path}:{key_node.start_mark.line + 1}"
        if key in values:
            raise ValueError(f"{where}: {'.'.join((*prefix, key))} is given twice")
        origin[(*prefix, key)] = where
        if isinstance(value_node, yaml.MappingNode):
            values[key] = _construct(value_node, path, (*prefix, key), origin)
        else:
            loader = _Loader("")
            try:
                values[key] = loader.construct_object(value_node, deep=True)
            finally:
                loader.dispose()
    return values


def _apply_override(values: dict[str, Any], override: str, origin: dict) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {override}: expected section.key=value, e.g. selection.ratio=0.5")
    parts = tuple(key.strip().split("."))
    section = values
    for part in parts[:-1]:
        if section.get(part) is None:  # a section that is switched off
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise ValueError(f"--set {override}: {part} is a value, not a section")
    try:
        section[parts[-1]] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {override}: the value is not valid YAML: {error}") from None
    if parts == ("selection", "ratio"):  # the two spellings of the budget replace each other
        section.pop("keep", None)
    elif parts == ("selection", "keep"):
        section.pop("ratio", None)
    for i in range(1, len(parts) + 1):
        origin[parts[:i]] = f"--set {override}" if i == len(parts) else origin.get(parts[:i], f"--set {override}")


def _explain(error: dict, origin: dict, path: str) -> str:
    """One pydantic error in the user's terms."""
    loc = tuple(str(part) for part in error["loc"])
    known = [loc[:n] for n in range(len(loc), 0, -1) if loc[:n] in origin]
    where = origin[known[0]] if known else path
    if error["type"] == "extra_forbidden":
        valid = _field_names(loc[:-1])
        near = difflib.get_close_matches(loc[-1], valid, n=1, cutoff=0.0) if valid else []
        hint = f"; did you mean {'.'.join((*loc[:-1], near[0]))}?" if near else ""
        return f"{where}: unknown key {'.'.join(loc)}{hint} (valid here: {', '.join(valid)})"
    if error["type"] == "missing":
        return f"{where}: {'.'.join(loc)} is missing"
    name = ".".join(part for part in (known[0] if known else loc))
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}: {name}: {message} (got {error['input']!r})" if error["type"] != "value_error" else (
        f"{where}: {name}: {message}"
    )


def _field_names(loc: tuple[str, ...]) -> list[str]:
    model: Any = Recipe
    for part in loc:
        if get_origin(model) is dict:  # sources: any name, then a section
            model = get_args(model)[1]
        else:
            field = getattr(model, "model_fields", {}).get(part)
            model = field.annotation if field else None
            if get_origin(model) is UnionType:  # a section that may be None
                model = next((kind for kind in get_args(model) if hasattr(kind, "model_fields")), None)
    return list(getattr(model, "model_fields", {}))
