"""What launch/setup.sh tells pip: the torch that is there stays, under the name by which pip knows it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

PIP = """
import os, pathlib, sys
with pathlib.Path(os.environ["TOLD"]).open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
    for flag, path in zip(sys.argv, sys.argv[1:]):
        if flag == "-c":
            file.write(pathlib.Path(path).read_text())
"""


@pytest.mark.parametrize(("installed", "pinned"), [("2.13.0", "torch==2.13.0"), (None, "torch==2.13.0+cu130")])
def test_the_torch_that_is_there_is_never_replaced(tmp_path, installed, pinned):
    for name in ("launch/setup.sh", "requirements.txt", "constraints.txt", "pyproject.toml"):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    packages = {"torch/__init__.py": "__version__ = '2.13.0+cu130'\n", "pip/__init__.py": "", "pip/__main__.py": PIP}
    if installed is not None:
        packages["torch-2.13.0.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: torch\nVersion: {installed}\n"
    for name, text in packages.items():
        (tmp_path / "packages" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "packages" / name).write_text(text)
    (tmp_path / "bin").mkdir()
    python3 = tmp_path / "bin" / "python3"  # an interpreter with nothing installed but what lies in `packages`
    python3.write_text(f'#!/bin/sh\nexec "{Path(sys.executable).resolve()}" -S "$@"\n')
    python3.chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{python3.parent}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "packages"), "TOLD": str(tmp_path / "told")
    }
    subprocess.run(["bash", "-c", ". launch/setup.sh && cds_setup --dev"], cwd=tmp_path / "checkout", env=environment, check=True)
    told = (tmp_path / "told").read_text().splitlines()
    assert [line for line in told if line.startswith("torch==")] == [pinned] * 3  # for requirements.txt, .[dev] and .[eval]
    assert sum(line.startswith("install -q -c ") for line in told) == 3
