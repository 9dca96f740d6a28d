"""Things that drift apart without a test."""

import re
import tomllib

from .conftest import ROOT


def test_requirements_are_those_of_the_package():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert lines[-1] == "-e ."
    assert sorted(lines[:-1]) == sorted(package["dependencies"])


def test_every_requirement_is_pinned_in_the_constraints():
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*package["dependencies"], *package["optional-dependencies"]["dev"]]
    missing = {re.split(r"[<>=\[]", w)[0].lower() for w in wanted} - {p.replace("_", "-") for p in pinned} - pinned
    assert not missing


def test_files_named_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"\b(?:recipes|launch|eval|tests|benchmarks|ds_configs|cluster_ds)/[\w./-]+\.(?:sh|py|md|json|yaml)", text))
    assert len(named) > 5
    assert [n for n in sorted(named) if "NAME" not in n and not (ROOT / n).is_file()] == []
