"""The GPU benchmark with a tiny model on the CPU: its result has its form, and it runs every GPU-marked test."""

import json
import os
import subprocess
import sys

import jsonschema
import pytest

from .conftest import ROOT

pytestmark = pytest.mark.distributed


def collected(*where):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", *where]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    return {line.strip() for line in done.stdout.splitlines() if "::" in line}


def test_the_script_and_its_result(tmp_path):
    result = tmp_path / "result.json"
    environment = {**os.environ, "PYTHON": sys.executable, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu.sh"), str(result), "--tiny"], capture_output=True, text=True, cwd=tmp_path,
        env=environment, timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(result.read_text())
    schema = json.loads((ROOT / "benchmarks" / "gpu.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(found, schema)
    assert found["tiny"] and found["device"] == "CPU" and found["training"]["steps"] == 6
    tests = {name for names in found["tests"].values() for name in names}
    assert tests == collected() and len(tests) >= 12 and not found["tests"]["failed"]
    assert len(found["tests"]["skipped"]) == len(tests)  # there is no GPU for them
    broken = {**found, "training": {**found["training"], "losses": []}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


def test_without_a_gpu_nothing_is_measured(tmp_path):
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--json", str(tmp_path / "x.json")], capture_output=True, text=True,
        env=environment, timeout=200,
    )
    assert done.returncode != 0 and "there is no GPU here: --tiny shows that the script works" in done.stderr
