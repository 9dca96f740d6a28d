"""Processes forked from a clean one that has loaded the libraries once for many runs; launchers in such processes."""

import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["cluster_ds.runs"])


def start(script: str, make: Callable[[], list[str]], folder: Path, output: Path) -> BaseProcess:
    """launch/`script` in `folder` with the arguments that `make` (which can be pickled) returns there; prints go to `output`."""
    process = FORKED.Process(target=_run, args=(script, make, folder, output))
    process.start()
    return process


def finish(process: BaseProcess) -> int:
    """The exit code; negative for a signal."""
    process.join(300)
    assert process.exitcode is not None, "it did not end"
    return process.exitcode


def _run(script: str, make: Callable[[], list[str]], folder: Path, output: Path) -> None:
    code = 1
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    os.environ.pop("DS_ACCELERATOR", None)
    try:
        os.chdir(folder)
        path = ROOT / "launch" / script
        sys.argv = [str(path), *make()]
        os.ftruncate(descriptor, 0)  # what the preparation has printed
        runpy.run_path(str(path), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
