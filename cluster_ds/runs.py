"""What surrounds the stages of a run: its start, its folder, the held-out loss, the closing table."""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
from safetensors import SafetensorError

from .arguments import add_recipe_arguments, recipe_from_args
from .distributed import PeerError, Ranks, is_peer_gone, ranks_of_job
from .dry_run import prediction_of, prediction_rows, training_seconds
from .files import is_disk_full, read_json, write_json
from .messages import quiet_libraries, show_table
from .models import attention_of, load_model, load_tokenizer, model_hash, pad_token_id
from .plan import counts_text
from .prepare import Prepared, cache_dir, extraction_dtype, prepare_tokens
from .recipe import Recipe
from .report import try_page
from .sample_losses import mean_losses, sample_losses
from .tokens import TokenTable
from .training import TrainResult
from .watch import EXIT_STOPPED, STOP_FILE, Stopped

_SDPA = "model.attn_implementation to sdpa"
_held: list[IO[str]] = []  # lock files of this process, open until it ends


def launch(parser: argparse.ArgumentParser, work: Callable[[Recipe, Path, Ranks, argparse.Namespace], None]) -> None:
    """Parse the arguments, join the job, do the work; what a user can mend becomes one message and exit code 2."""
    add_recipe_arguments(parser)
    parser.add_argument("--verbose", action="store_true", help="let libraries say all that they have to say, on every rank")
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", 0))
    if not args.verbose:
        quiet_libraries(rank)

    def refuse(message: str) -> NoReturn:
        print(f"error: {message}" if rank == 0 else f"error on rank {rank}: {message}", file=sys.stderr, flush=True)
        sys.exit(2)

    if args.stop_file:  # an argument reaches the ranks of every node, a variable does not
        os.environ[STOP_FILE] = args.stop_file
    try:
        recipe, output_dir = recipe_from_args(args)
    except ValueError as error:
        if rank > 0:  # the same on every rank
            sys.exit(2)
        refuse(str(error))
    try:
        with ranks_of_job() as ranks:
            work(recipe, output_dir, ranks, args)
    except Stopped as stop:
        if rank == 0:
            print(
                f"stopped behind step {stop.step}, its checkpoint is written: the same command continues (exit code "
                f"{EXIT_STOPPED})", file=sys.stderr, flush=True,
            )  # fmt: skip
        sys.exit(EXIT_STOPPED)
    except PeerError as error:  # that rank says why
        sys.exit(EXIT_STOPPED if "stopped by" in str(error) else 2)
    except ValueError as error:
        refuse(str(error))
    except (OSError, RuntimeError, SafetensorError) as error:
        if is_disk_full(error):
            refuse(
                f"the disk is full ({error}): free space and run the same command again; it continues from what is "
                "finished, and the last whole checkpoint is kept"
            )
        if is_peer_gone(error):
            refuse(
                f"lost the connection to another rank, which has ended or cannot be reached and says why itself "
                f"({str(error).splitlines()[0]}); the same command continues from what is finished"
            )
        if not isinstance(error, OSError):
            raise
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            refuse(f"{error}: see to the permission, or choose another --output_dir or data.cache_dir")
        refuse(str(error))


def open_run(recipe: Recipe, output_dir: Path, ranks: Ranks) -> None:  # collective
    """Make the run's folder and hold it: a second job in it is refused while this one runs.

    Raises:
        ValueError: if another job holds it, or a node does not see it.
    """
    lock = output_dir / ".lock"

    def work() -> None:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            file = lock.open("a+")
        except OSError as error:
            raise ValueError(f"cannot write to {output_dir} ({error.strerror}): choose another --output_dir") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the kernel when this process ends
        except BlockingIOError:
            file.seek(0)
            raise ValueError(f"{output_dir} is in use by {file.read()}: wait, or choose another --output_dir") from None
        except OSError:  # a file system without locks
            ranks.print(f"[run] {output_dir} cannot be locked on this file system: take care that no second job uses it")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        _held.append(file)
        port = f", port {os.environ['MASTER_PORT']}" if ranks.world_size > 1 else ""
        where = f"{ranks.world_size} rank{'s' * (ranks.world_size > 1)} on {ranks.device.type}{port}"
        ranks.print(f"[run] recipe {recipe.name}, {where}, folder {output_dir}")

    ranks.on_main(work)
    attention = ranks.gather(attention_of(recipe.model))
    if len(set(attention)) > 1:
        without = [rank for rank, name in enumerate(attention) if name == "sdpa"]
        raise ValueError(f"ranks {without} have no flash-attention, the others have: install it there, or set {_SDPA}")
    if attention[0] != recipe.model.attn_implementation:
        asked = f"model.attn_implementation is {recipe.model.attn_implementation}"
        ranks.print(f"[run] {asked}, but flash-attention is not installed here or there is no GPU for it: sdpa in its place")
    cache = cache_dir(recipe, output_dir)
    ranks.on_main(lambda: cache.mkdir(parents=True, exist_ok=True))
    for folder, what in ((lock, output_dir), (cache, cache)):
        blind = [rank for rank, sees in enumerate(ranks.gather(folder.exists())) if not sees]
        if blind:
            raise ValueError(f"ranks {blind} do not see {what}: put it on a file system that all nodes share")


def held_out_tokens(recipe: Recipe, output_dir: Path, ranks: Ranks) -> TokenTable | None:  # collective
    """The recipe's held-out samples; None if it names none."""
    return prepare_tokens(recipe, output_dir, ranks, held_out=True) if recipe.held_out else None


def evaluate_held_out(
    recipe: Recipe, tokens: TokenTable | None, model: Path, output_dir: Path, ranks: Ranks, *, label: str
) -> dict[str, float] | None:  # collective
    """Means of a model folder's held-out losses, see `sample_losses.mean_losses`; None without held-out data."""
    if tokens is None:
        return None
    losses, cached = held_out_losses(recipe, tokens, model, output_dir, ranks)
    result = mean_losses(losses, tokens.num_supervised)
    ranks.print(
        f"[held-out] {label} training: loss {result['sample_mean']:.4f} (mean over {result['num_samples']:.0f} samples), "
        f"{result['token_mean']:.4f} (mean over tokens)" + (" (cached)" if cached else "")
    )
    return result


def held_out_losses(
    recipe: Recipe, tokens: TokenTable, model: Path, output_dir: Path, ranks: Ranks
) -> tuple[np.ndarray, bool]:  # collective
    """A model folder's mean token loss of each held-out sample, float64 [N]; kept on disk by the hashes of model and tokens.

    Returns:
        the losses, and whether they were there.
    """
    key = ranks.on_main(lambda: f"{model_hash(model)}-{tokens.key}")
    path = cache_dir(recipe, output_dir) / "held_out" / f"{key}.losses.json"
    kept = ranks.on_main(lambda: read_json(path) if path.is_file() else None)
    if kept is not None:
        return np.array(kept), True
    losses = sample_losses(
        tokens, lambda: load_model(model, recipe.model, extraction_dtype(recipe), ranks.device), ranks,
        pad_id=pad_token_id(load_tokenizer(model)), tokens_per_batch=recipe.selection.tokens_per_batch,
        cpu_threads=recipe.selection.cpu_threads,
    )

    def keep() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, losses.tolist())

    ranks.on_main(keep)
    return losses, False


def report(write: Callable[[], Path | None], ranks: Ranks) -> None:  # collective
    """Let rank 0 write a page for people, see `try_page`."""
    ranks.print(ranks.on_main(lambda: try_page(write)))


def print_summary(
    recipe: Recipe, prepared: Prepared, result: TrainResult, before: dict[str, float] | None,
    after: dict[str, float] | None, output_dir: Path, ranks: Ranks, seconds: float,
) -> None:
    """The closing table, and the same as summary.json."""
    if not ranks.is_main:
        return
    m = prepared.plan.manifest
    stages = {**prepared.seconds, "training": result.seconds}
    summary: dict[str, Any] = {
        "samples": m["num_samples"], "kept": m["num_kept"], "kept_fraction": m["num_kept"] / m["num_samples"],
        "sizes": m["sizes"], "weights": m["weights"], "steps": result.num_steps, "seconds": stages,
        "total_seconds": seconds, "held_out_before": before, "held_out_after": after, "model": str(result.model),
        "plan_hash": prepared.plan.hash, "world_size": ranks.world_size,
    }
    probe = prediction_of(output_dir, ranks.world_size, recipe)
    log = output_dir / "log.jsonl"
    if probe is not None and log.is_file():
        measured = sum(json.loads(line)["seconds"] for line in log.read_text().splitlines())
        summary["prediction"] = {
            "steps_predicted": training_seconds(prepared.plan, recipe, probe), "steps_measured": measured,
            "extraction_predicted": probe["selection_seconds"], "extraction_measured": prepared.seconds["proxies"],
        }
    if not result.reused or not (output_dir / "summary.json").is_file():
        write_json(output_dir / "summary.json", summary)
    rows = [
        ("samples", str(m["num_samples"])),
        ("kept", f"{m['num_kept']} ({summary['kept_fraction']:.1%}), {counts_text(np.array(m['counts']))}"),
        ("cluster sizes", ", ".join(map(str, m["sizes"]))), ("weights", ", ".join(f"{w:.3f}" for w in m["weights"])),
        ("seconds", ", ".join(f"{k} {v:.0f}" if v else f"{k} reused" for k, v in stages.items())),
        ("seconds in all", f"{seconds:.0f}"),
    ]
    if "prediction" in summary:
        for what, predicted, measured, ratio in prediction_rows(summary["prediction"]):
            rows.append((f"{what}, predicted", f"{predicted}; measured {measured}" + (f" ({ratio})" if ratio else "")))
    if before and after:
        first, last = before["sample_mean"], after["sample_mean"]
        rows.append(("held-out loss", f"{first:.4f} before, {last:.4f} after ({last - first:+.4f})"))
    rows += [
        ("model", str(result.model)), ("plan, log", f"{output_dir / 'plan'}, {output_dir / 'log.jsonl'}"),
        ("try next", f"the same command with --set selection.ratio=0.5 --output_dir {output_dir}_half"),
    ]
    show_table(f"{recipe.name}: summary", rows)
