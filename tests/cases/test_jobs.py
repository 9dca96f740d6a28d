"""S05 and S08: whole jobs side by side on one machine."""

import json
import random
import signal
import socket
import time
from functools import partial

import pytest

from ..distributed.jobs import ROOT, TIMEOUT_S, finish, start_job, weights_hash
from ..forked import finish as ended
from ..forked import start
from ..test_jobs import bash, commands

pytestmark = pytest.mark.distributed
JOB = ("--set", "train.epochs=1", "--set", "evaluate.held_out=null")


@pytest.mark.slow
def test_S08_two_trainings_on_one_machine(tmp_path):
    outputs = [tmp_path / name for name in ("side_a", "side_b")]
    jobs = [start_job(output, *JOB, port=None) for output in outputs]
    ports = set()
    for job, output in zip(jobs, outputs, strict=True):
        ports.add(finish(job, output).split(", port ")[1].split(",")[0])
    alone = tmp_path / "alone"
    finish(start_job(alone, *JOB), alone)
    assert {weights_hash(output) for output in outputs} == {weights_hash(alone)}
    assert len(ports) == 2 and "29500" not in ports
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for how in ({"port": port}, {"port": None, "environment": {"MASTER_PORT": str(port)}}):
            output = tmp_path / f"taken_{len(how)}"
            started = time.monotonic()
            job = start_job(output, *JOB, **how)
            assert job.wait(TIMEOUT_S) == 2
            text = output.with_suffix(".out").read_text()
            assert f"port {port} (MASTER_PORT, or deepspeed --master_port) is in use" in text and "Traceback" not in text
            assert time.monotonic() - started < 120  # imports included


def test_S05_two_jobs_build_one_cache(tmp_path):
    """Started within 300 ms of each other; in every fourth round the first is killed; then a third uses what is there."""
    rng = random.Random(0)
    rows = ROOT / "tests" / "cases" / "inputs" / "s02_21rows.jsonl"
    settings = [f"data.path={rows}", "data.template=alpaca", "data.max_length=400", "train.global_batch_size=8"]
    for number in range(20):
        folder = tmp_path / str(number)
        cache = folder / "cache"
        cache.mkdir(parents=True)

        def job(name, folder=folder, cache=cache):
            words = [w for s in [*settings, f"data.cache_dir={cache}"] for w in ("--set", s)]
            arguments = ["--recipe", "tiny", "--output_dir", str(folder / name), *words]
            return start("preprocess.py", partial(list, arguments), folder, folder / f"{name}.out")

        first = job("a")
        time.sleep(rng.uniform(0, 0.3))
        second = job("b")
        if number % 4 == 3:
            time.sleep(rng.uniform(0, 0.3))
            first.kill()
        codes = {"a": ended(first), "b": ended(second)}
        text = {name: (folder / f"{name}.out").read_text() for name in codes}
        assert codes["b"] == 0 and codes["a"] in (0, -signal.SIGKILL if number % 4 == 3 else 0), text
        assert ended(job("c")) == 0
        assert "(cached)" in (folder / "c.out").read_text()
        finished = ["c", *(name for name, code in codes.items() if code == 0)]
        assert len({json.loads((folder / n / "plan" / "manifest.json").read_text())["plan_hash"] for n in finished}) == 1
        left = [p.name for p in cache.rglob("*") if ".part" in p.name or p.name.endswith(".lock")]
        assert not left or number % 4 == 3, left


def test_E01_the_schedulers_gpus_are_used(tmp_path):
    """The job script of a recipe, spooled elsewhere, on a node that shares its GPUs."""
    spool = tmp_path / "spool"
    fake = commands(tmp_path / "bin", deepspeed=(ROOT / "tests" / "cases" / "inputs" / "e01_fake_deepspeed.sh").read_text())
    spool.mkdir()
    (spool / "slurm_script").write_text((ROOT / "recipes" / "magicoder_7b.sh").read_text())
    _, text = bash(
        spool / "slurm_script", "--output_dir", str(tmp_path / "run"), cwd=tmp_path, first=fake, SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_ID="7", SLURM_NTASKS="1", SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="n1", CUDA_VISIBLE_DEVICES="4,5",
    )
    (arguments,) = (line for line in text.splitlines() if line.startswith("ARGS"))
    assert "ENV CUDA_VISIBLE_DEVICES=4,5" in text.splitlines()
    assert "--include" not in arguments and "--num_gpus" not in arguments
    assert "--master_port" in arguments and arguments.index("--master_port") < arguments.index("train.py")
    assert f"{ROOT}/launch/train.py --recipe magicoder_7b" in arguments
    assert "2 devices where the recipe names 4: 2 ranks share 512 samples a step" in text
