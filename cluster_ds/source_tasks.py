"""Instruction data from the source text of the Python that runs us: real code and prose, long-tailed, deterministic.

Eight kinds of task are read out of each module's syntax tree. A module belongs either to the training or to the held-out
part, by a hash of its name, so the two share no file.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("numpy", "sklearn", "torch", "transformers", "datasets", "pydantic", "rich", "jinja2", "networkx", "tqdm")
_SKIPPED = {"test", "tests", "testing", "idle_test", "lib2to3", "site-packages", "__pycache__", "pydoc_data", "encodings"}
VERSION = 2  # part of the cache key
_MODULES_PER_SOURCE = 220
_HELD_OUT_IN = 8  # every eighth module
# Shares of the kinds: a long tail, as in the data sets that people have.
SHARES = {
    "write": 0.36, "complete": 0.20, "document": 0.15, "parameters": 0.11, "doctest": 0.08, "module": 0.05,
    "raises": 0.03, "methods": 0.02,
}
_PHRASES = {
    "write": ("Write a Python function `{name}`. {summary}", "Implement `{name}` in Python: {summary}"),
    "complete": ("Complete this Python function.\n\n{head}", "Fill in the body of the function.\n\n{head}"),
    "document": ("What does this function do?\n\n{code}", "Summarise this function in a sentence.\n\n{code}"),
    "parameters": ("List the parameters of this function as JSON.\n\n{head}", "Return the arguments as JSON.\n\n{head}"),
    "doctest": ("What does Python print?\n\n>>> {code}", "Give the output of this expression.\n\n{code}"),
    "module": ("What is the Python module `{name}` for?", "Describe the module `{name}`."),
    "raises": ("Which exceptions can this function raise?\n\n{code}", "Name the exceptions raised here.\n\n{code}"),
    "methods": ("Name the public methods of the class.\n\n{head}", "List the class's public methods.\n\n{head}"),
}
Row = dict[str, str]


def make_tasks(sizes: dict[str, int], max_chars: int) -> dict[str, list[Row]]:
    """Instruction rows from this machine's Python.

    Args:
        sizes: part -> its rows; a part is "train", or starts with "held_out".
        max_chars: longest instruction and response together.
    Returns:
        the rows of each part; each has instruction, response, kind and module.
    Raises:
        ValueError: if this Python's source text yields too few.
    """
    pools: dict[bool, dict[str, list[Row]]] = {held: {kind: [] for kind in SHARES} for held in (False, True)}
    for name, path in _modules():
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        pool = pools[_digest(name) % _HELD_OUT_IN == 0]
        for kind, values, response in _tasks(name, source, tree):
            phrases = _PHRASES[kind]
            instruction = phrases[_digest(name + kind + response) % len(phrases)].format(**values)
            if 0 < len(response) and len(instruction) + len(response) <= max_chars:
                pool[kind].append({"instruction": instruction, "response": response, "kind": kind, "module": name})
    return {part: _draw(pools[part != "train"], size) for part, size in sizes.items()}


def _draw(pool: dict[str, list[Row]], count: int) -> list[Row]:
    """`count` rows with the kinds in their shares, in an order that does not follow files."""
    rows: list[Row] = []
    for kind, share in SHARES.items():
        unique = {row["instruction"]: row for row in pool[kind]}.values()
        ranked = sorted(unique, key=lambda row: _digest(row["instruction"] + row["response"]))
        rows += ranked[: max(1, round(share * count))]
    rows.sort(key=lambda row: _digest(row["response"] + row["instruction"]))
    if len(rows) < 0.9 * count:
        raise ValueError(f"this Python's source text gives {len(rows)} tasks, {count} wanted: is its .py text installed?")
    return rows[:count]


def _modules() -> Iterator[tuple[str, Path]]:
    """Module names and files of the standard library and of PACKAGES, a bounded and fixed choice."""
    roots = {"": Path(sysconfig.get_paths()["stdlib"])}
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            roots[package] = Path(spec.origin).parent
    for package, root in roots.items():
        names = {}
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            if not _SKIPPED.intersection(parts) and not any(part.startswith("test") for part in parts):
                name = ".".join(p for p in ((package,) if package else ()) + parts if p != "__init__")
                names[name or package] = path
        for name in sorted(names, key=_digest)[:_MODULES_PER_SOURCE]:
            yield name, names[name]


def _tasks(name: str, source: str, tree: ast.Module) -> Iterator[tuple[str, dict[str, str], str]]:
    """(kind, values of its phrase, response) of one module."""
    summary = _first_paragraph(ast.get_docstring(tree))
    if summary:
        yield "module", {"name": name}, summary
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from _function_tasks(source, node)
        elif isinstance(node, ast.ClassDef):
            public = [n.name for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
            if 2 <= len(public) <= 12:
                head = "class " + node.name + ":\n" + "\n".join(f"    def {n}(self, ...): ..." for n in _all_methods(node))
                yield "methods", {"head": head}, ", ".join(public)


def _function_tasks(source: str, node: ast.FunctionDef) -> Iterator[tuple[str, dict[str, str], str]]:
    docstring = ast.get_docstring(node)
    summary = _first_paragraph(docstring)
    body = node.body[1:] if docstring else node.body
    if not body or isinstance(body[0], ast.Pass):
        return
    head_end = node.body[0].lineno - 1
    head = _lines(source, node.lineno, head_end) if head_end >= node.lineno else ""
    text = _lines(source, body[0].lineno, node.end_lineno or body[0].lineno)
    if not head or not text:
        return
    code = _dedent(head + "\n" + text)
    if summary and len(summary) > 20:
        yield "write", {"name": node.name, "summary": summary}, code
        yield "document", {"code": code}, summary
        yield "complete", {"head": _dedent(head) + f'\n    """{summary}"""'}, "    " + _dedent(text).replace("\n", "\n    ")
    parameters = _parameters(node)
    if len(parameters) >= 2:
        yield "parameters", {"head": _dedent(head)}, json.dumps(parameters)
    raised = {r.exc.func.id for r in ast.walk(node) if isinstance(r, ast.Raise) and isinstance(r.exc, ast.Call)
              and isinstance(r.exc.func, ast.Name)}  # fmt: skip
    if raised:
        yield "raises", {"code": code}, ", ".join(sorted(raised))
    for expression, output in _doctests(docstring or ""):
        yield "doctest", {"code": expression}, output


def _parameters(node: ast.FunctionDef) -> list[dict[str, str | None]]:
    arguments = [a for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
    defaults: list[ast.expr | None] = [None] * len(arguments) + list(node.args.defaults)
    paired = zip(arguments, defaults[len(defaults) - len(arguments) :], strict=True) if arguments else ()
    return [{"name": a.arg, "default": ast.unparse(d) if d else None} for a, d in paired]


def _doctests(docstring: str) -> Iterator[tuple[str, str]]:
    lines = docstring.splitlines()
    for line, following in zip(lines, lines[1:], strict=False):
        expression, output = line.strip(), following.strip()
        if expression.startswith(">>> ") and output and not output.startswith((">>>", "...", "Traceback")):
            yield expression[4:], output


def _all_methods(node: ast.ClassDef) -> list[str]:
    return [n.name for n in node.body if isinstance(n, ast.FunctionDef)]


def _first_paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").strip().split("\n\n")[0].split())


def _lines(source: str, first: int, last: int) -> str:
    return "\n".join(source.splitlines()[first - 1 : last])


def _dedent(text: str) -> str:
    return inspect.cleandoc("\n" + text)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
