"""Generated code is untrusted: it runs in the jail's namespaces, or not at all unless the user says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMORY_BYTES = 4 << 30  # of all processes of a check together; EvalPlus's own limit for one
ACCEPT = "--i_accept_unsandboxed_execution"
_JAIL = Path(__file__).with_name("jail.py")
_PASSED_ON = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH")


class SandboxError(ValueError):
    """The sandbox itself failed, so nothing is known about what it was to check."""


@dataclass(frozen=True)
class Outcome:
    """What became of a check: its value, or "timeout", "memory" or "died", which it brought upon itself."""

    value: Any = None
    error: str | None = None


class Sandbox:
    """One clean interpreter that runs checks one after the other, each in namespaces of its own.

    Args:
        warm: modules that it imports once.
        isolated: False leaves only limits on memory, processes and time; the caller has accepted that.
    """

    def __init__(self, warm: tuple[str, ...] = (), isolated: bool = True):
        mode = "isolated" if isolated else "bare"
        self._process = subprocess.Popen(
            [sys.executable, str(_JAIL), mode, "checks", *warm], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=_environment(), start_new_session=True,
        )

    def call(self, function: str, *, limit_s: float, memory_bytes: int = MEMORY_BYTES, **arguments: Any) -> Outcome:
        """Run a function of `checks`.

        Args:
            function: its name.
            limit_s: wall time after which everything that it started is killed.
            memory_bytes: of all its processes together.
            arguments: JSON.
        Raises:
            SandboxError: if the sandbox itself failed, so that nothing is known about the check.
        """
        request = {"function": function, "arguments": arguments, "limit_s": limit_s, "memory_bytes": memory_bytes}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SandboxError(f"the sandbox's interpreter has ended with code {self._process.wait()}, see above")
        answer = json.loads(line)
        if "fault" in answer:
            raise SandboxError(f"{function} in the sandbox: {answer['fault']}")
        return Outcome(answer.get("value"), answer.get("error"))

    def close(self) -> None:
        """End the interpreter."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Sandbox:
        """Itself."""
        return self

    def __exit__(self, *_: Any) -> None:
        """End the interpreter."""
        self.close()


def require_sandbox(warm: tuple[str, ...] = ()) -> None:
    """Refuse a machine where generated code could not be contained, by trying.

    Args:
        warm: modules that the checks will need.
    Raises:
        ValueError: with the remedies.
    """
    canary: AbstractContextManager[Any] = nullcontext()
    with suppress(OSError):  # a home that cannot be written to: nothing to look for
        canary = tempfile.NamedTemporaryFile(dir=Path.home(), prefix=".cluster_ds_canary_")
    try:
        with canary as file, Sandbox(warm) as sandbox:
            seen = sandbox.call("probe", limit_s=60, canary=None if file is None else file.name).value
    except SandboxError as error:
        raise ValueError(
            f"no sandbox for generated code here ({error}): it needs unprivileged user, pid, mount and network namespaces. "
            "Have them switched on (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0, "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container also a seccomp profile that allows unshare and "
            f"mount), score samples.jsonl on another machine, or take the risk with {ACCEPT}"
        ) from None
    if seen is None or seen["uid"] == 0 or seen["pid"] != 1 or set(seen["networks"]) - {"lo"} or seen["canary"]:
        raise ValueError(f"the sandbox for generated code leaks on this machine: a check saw {seen}")


def _environment() -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {
        **passed, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": "/tmp",
        "HF_HUB_OFFLINE": "1",
        # EvalPlus would set a stack limit that most containers forbid, and count all solutions as timed out; limits are ours
        "EVALPLUS_MAX_MEMORY_BYTES": "-1",
    }
