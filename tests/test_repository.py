"""Things that drift apart without a test."""

import re
import subprocess
import sys
import tomllib

from cluster_ds.ds_config import resolve_config
from cluster_ds.estimate import memory_per_gpu, total_bytes
from cluster_ds.recipe import TrainSection
from cluster_ds.shapes import SHAPES

from .conftest import ROOT

TABLE = [  # config, precision, optimizer, size, GPUs
    ("zero0", "bf16_autocast", "adafactor", "7b", 4), ("zero0", "pure_bf16", "adafactor", "7b", 4),
    ("zero1", "bf16", "adamw", "7b", 4), ("zero2", "bf16", "adamw", "7b", 4), ("zero2", "bf16", "adamw", "7b", 8),
    ("zero3", "bf16", "adamw", "7b", 4), ("zero3_offload", "bf16", "adamw", "7b", 2),
    ("zero2", "bf16", "adamw", "13b", 4), ("zero2", "bf16", "adamw", "13b", 8), ("zero3", "bf16", "adamw", "13b", 4),
    ("zero3", "bf16", "adamw", "13b", 8), ("zero3_offload", "bf16", "adamw", "13b", 2),
]


def zero_table() -> list[str]:
    """The rows of ds_configs/README.md: gigabytes on each GPU with micro-batches of 4 x 1,216 tokens."""
    rows = []
    for config, precision, optimizer, size, ranks in TABLE:
        t = TrainSection(epochs=1, global_batch_size=512, micro_batch_size=4, lr=1e-5, precision=precision, optimizer=optimizer)
        shape = SHAPES[f"codellama/CodeLlama-{size}-Python-hf"]
        m = memory_per_gpu(shape, t, resolve_config(config, t, ranks), ranks, 1216)
        gradients = m["gradients"] + m["fp32 accumulation"]
        rest = m["activations"] + m["loss"] + m["autocast copies"] + m["reserve"]
        total = total_bytes(m) / 1e9
        host = f" (+ {m['on the host'] / 1e9:.0f} on the host)" if "on the host" in m else ""
        cells = [f"{v / 1e9:.1f}" for v in (m["parameters"], gradients, m["optimizer"], m["buckets"], rest)]
        rows.append(
            f"| {config} | {precision}, {optimizer} | {size.upper()} | {ranks} | {' | '.join(cells)} | "
            f"{'**' if total <= 80 else ''}{total:.0f}{'**' if total <= 80 else ''}{host} |"
        )
    return rows


def test_the_table_of_the_zero_configs_is_what_the_estimate_says():
    text = (ROOT / "ds_configs" / "README.md").read_text()
    assert [row for row in zero_table() if row not in text] == []


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


def test_recipes_are_listed_without_heavy_libraries():
    program = (
        "import runpy, sys; sys.argv = ['recipe.py', 'ls']; runpy.run_path('launch/recipe.py', run_name='__main__'); "
        "print(*sorted({'torch', 'transformers', 'deepspeed', 'sklearn'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "magicoder_7b" in done.stdout and done.stderr.strip() == ""
