"""What the documents say: links lead somewhere, messages are those of the code, commands run."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    lost, found = [], 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith(("https://", "http://")):
                continue
            file, _, anchor = target.partition("#")
            place = (page.parent / file).resolve() if file else page
            found += 1
            if not place.exists() or (anchor and place.suffix == ".md" and anchor not in headings(place)):
                lost.append(f"{page.relative_to(ROOT)}: {target}")
    assert found > 40 and lost == []


def test_every_page_of_the_documentation_is_in_its_index():
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in ROOT.glob("docs/*.md") if page.name != "README.md" and f"]({page.name})" not in index] == []


def strings_of_the_code() -> list[str]:
    """All texts of the package and its scripts, what is filled in replaced by \\0."""
    out = []
    for file in [*ROOT.glob("cluster_ds/**/*.py"), *ROOT.glob("launch/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                out.append("".join(map(str, parts)))
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                sides = [s for s in (node.left, node.right) if isinstance(s, ast.Constant) and isinstance(s.value, str)]
                out += [s.value for s in sides]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                out.append(node.value)
    return out


def test_messages_are_those_of_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    code = strings_of_the_code()
    unknown = []
    for message in messages:
        pattern = re.compile(".*".join(re.escape(part) for part in message.split("...")), re.DOTALL)
        if not any(pattern.search(string) for string in code):
            unknown.append(message)
    assert len(messages) > 25 and unknown == []


# Commands of the documents that are not run here, by what they hold, and why. Figures of results.md and benchmarks.md come
# from commands that take hours; the others' placeholders are filled in.
RECORDS = ("results.md", "benchmarks.md", "CHANGELOG.md")
NEEDS = {
    "SLURM": ("sbatch",),
    "the hub": ("medqa.sh", "mbpp.sh"),
    "to be the caller of this test": ("tests/run.sh", ".ci/run"),
    "half an hour or more": ("benchmarks/smollm2.yaml", "benchmarks/train.py"),
    "GPUs": ("benchmarks/gpu.sh", "launch/train.py --recipe magicoder_7b", "compare.py --recipe magicoder_7b"),
}
FILLED = {  # pattern -> what a reader would put there
    r"runs/magicoder_7b runs/other": "runs/tiny", r"runs/magicoder_7b": "runs/tiny", r"~/jobs": "jobs", r"\[--limit N\]": "",
    r"\[--ranks W\]": "--ranks 2", r"\[LABEL=\]RUN \.\.\.": "runs/tiny", r"--probe 10": "--probe 2", r"examples/NAME": "examples/cluster_loop",
    r"\bNAME\b": "tiny", r"\bMODEL\b": "runs/tiny/model", r" (R|RUN)\b": " runs/mine_75", r" C\b": " runs/mine_compare",
    r"(humaneval.sh runs\S+).*": r"\1 --limit 2", r"tests/faults.sh$": "tests/faults.sh 1 3",
    r"humaneval.sh \S+/ARM/model.*": "humaneval.sh runs/tiny/model --limit 2",
}  # fmt: skip
MADE_BY = [  # part of a command, the folder that it reads, the documents' command that makes it
    ("runs/mine_75", "runs/mine_75", "deepspeed launch/train.py --recipe mine.yaml --set selection.ratio=0.75 --output_dir runs/mine_75"),
    ("runs/mine_compare", "runs/mine_compare", "deepspeed launch/compare.py --recipe mine.yaml --arms random,cluster,ifd --keep 0.4 --seeds 0,1,2"),
    ("eval/report.py", "runs/tiny/eval", "bash eval/humaneval.sh runs/tiny/model --limit 2"),
]
MENTIONED = r"deepspeed launch/\w+\.py|python -m [\w.]+"  # programs, not commands
LONG = ("tests/", "quickstart", "compare.py", "eval/", "examples/", "cluster_ds.analysis", "mine", "--probe", "HF_HUB_OFFLINE")


def commands(page: Path) -> list[str]:
    """The commands in a page's bash blocks and code spans, without comments."""
    text = page.read_text()
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.replace("\\\n", " ").splitlines()]
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines += [span.replace("\n", " ") for span in re.findall(r"`((?:bash|python|deepspeed) [^`]+)`", text)]
    found = [re.sub(r"\s+#.*", "", line).strip() for line in lines]
    for sign, value in FILLED.items():
        found = [re.sub(sign, value, command).strip() for command in found]
    return [command for command in found if command and not re.fullmatch(MENTIONED, command)]


def why_not(command: str) -> str | None:
    return next((why for why, signs in NEEDS.items() if any(sign in command for sign in signs)), None)


EVERY = list(dict.fromkeys(command for page in PAGES if page.name not in RECORDS for command in commands(page)))
SHORT = [c for c in EVERY if why_not(c) is None and not any(sign in c for sign in LONG)]
WHOLE = [c for c in EVERY if why_not(c) is None and c not in SHORT]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what is tracked, as a clone has it, with a finished run of `tiny`."""
    folder = tmp_path_factory.mktemp("documents") / "cluster-ds"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    mine = (folder / "recipes" / "tiny.yaml").read_text().replace("train:", "train:\n  diagnose_every: 2")
    mine = mine.replace("min_fraction: 0.3", "min_fraction: 0.5")  # so that --keep 0.4 can be kept
    (folder / "mine.yaml").write_text(mine)  # what a reader would write
    run_in(folder, "bash recipes/tiny.sh")
    return folder


def run_in(folder: Path, command: str, timeout: int = 1800) -> str:
    """As it stands, in a reader's shell with the environment of this test; a recipe for GPUs finds two."""
    command = re.sub(r"^deepspeed (?=.*mine\.yaml)", "deepspeed --num_gpus 2 ", command)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_most_commands_are_run():
    assert len(SHORT) > 10 and len(WHOLE) > 5


@pytest.mark.distributed
def test_short_commands_run(checkout):
    for command in SHORT:
        run_in(checkout, command)


@pytest.mark.slow
@pytest.mark.parametrize("command", WHOLE)
def test_long_commands_run(checkout, command):
    for sign, folder, needed in MADE_BY:
        if sign in command and command != needed and not (checkout / folder).exists():
            assert needed in WHOLE
            run_in(checkout, needed)
    run_in(checkout, command)


def test_python_of_the_export_page_runs(tmp_path):
    (tmp_path / "runs" / "tiny" / "export").mkdir(parents=True)
    row = '{"instruction": "q", "response": "%s", "weight": %s}\n'
    (tmp_path / "runs/tiny/export/kept.jsonl").write_text(row % ("four", 0.5) + row % ("ten letter", 2.0))
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    rows = [json.loads(line) for line in (tmp_path / "runs/tiny/export/swift.jsonl").read_text().splitlines()]
    assert [row["messages"][1]["loss_scale"] for row in rows] == [0.5 * 7 / 4, 2.0 * 7 / 10]
