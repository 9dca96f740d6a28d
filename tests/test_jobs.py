"""Job scripts and the recipe command: found from anywhere, copied, checked by shellcheck, honest about devices."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_ds.catalogue import checked, copy_recipe, device_note
from cluster_ds.recipe_file import RECIPES_DIR, available_recipes, find_recipe, load_recipe

from .conftest import ROOT

FAKE = ROOT / "tests" / "cases" / "inputs" / "e01_fake_deepspeed.sh"
PAPER = ("magicoder_7b", "magicoder_7b_8gpu", "magicoder_13b", "evol_7b", "medinstruct_7b", "medinstruct_13b")


def bash(script, *arguments, cwd, **environment):
    """A job script's output; in the PATH stand the given folder's commands, then this Python's."""
    path = os.pathsep.join([environment.pop("first", ""), str(Path(sys.executable).parent), os.environ["PATH"]])
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "CUDA_", "CLUSTER_DS_HOME", "MASTER_", "NUM_CPU"))}
    done = subprocess.run(
        ["bash", str(script), *arguments], cwd=cwd, capture_output=True, text=True, timeout=300,
        env={**clean, "PATH": path, "HF_HUB_OFFLINE": "0", **environment},
    )
    return done.returncode, done.stdout + done.stderr


def commands(folder: Path, **scripts: str) -> str:
    """A folder of stand-in commands."""
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return str(folder)


def test_shellcheck_passes():
    shellcheck = shutil.which("shellcheck") or str(Path(sys.executable).parent / "shellcheck")  # the tests' own set-up brings it
    scripts = [*ROOT.glob("launch/*.sh"), *ROOT.glob("recipes/*.sh"), *ROOT.glob("eval/*.sh"), *ROOT.glob("tests/*.sh"), ROOT / ".ci/run"]
    assert len(scripts) > 14
    done = subprocess.run([shellcheck, "-x", "-P", str(ROOT), "--severity=style", *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", PAPER)
def test_a_job_script_asks_for_what_its_recipe_names(name):
    recipe, text = load_recipe(name), (RECIPES_DIR / f"{name}.sh").read_text()
    assert f"#SBATCH --gpus-per-node={recipe.hardware.ranks}\n" in text and "#SBATCH --nodes=1\n" in text
    assert "#SBATCH --signal=B:USR1@300\n" in text and "#SBATCH --requeue\n" in text
    assert f"# ZeRO config: ds_configs/{recipe.deepspeed.config}.json" in text and f"\nrecipe={name}\n" in text
    assert recipe.evaluate.benchmarks and 'cds_evaluate "$recipe" "$@"' in text


def test_the_recipes_say_what_the_paper_and_the_authors_say():
    """Written from the references by hand."""
    facts = {
        # optimizer, lr, schedule, warm-up, epochs, global batch, K, max length, clipping, template
        "magicoder_7b": ("adafactor", 5e-5, "linear", 15, 2, 512, 4, 1216, 0.0, "magicoder"),
        "magicoder_7b_8gpu": ("adafactor", 5e-5, "linear", 15, 2, 512, 8, 1216, 0.0, "magicoder"),
        "magicoder_13b": ("adamw", 5e-5, "linear", 15, 2, 512, 4, 1216, 0.0, "magicoder"),
        "evol_7b": ("adamw", 5e-5, "linear", 0.05, 2, 512, 4, 1024, 1.0, "magicoder"),
        "medinstruct_7b": ("adamw", 2e-5, "cosine", 0.03, 3, 128, 4, 1024, 1.0, "alpaca"),
        "medinstruct_13b": ("adamw", 1e-5, "cosine", 0.03, 3, 128, 4, 1024, 1.0, "alpaca"),
    }
    for name, expected in facts.items():
        r = load_recipe(name)
        t = r.train
        warmup = t.warmup_ratio if t.warmup_ratio is not None else t.warmup_steps
        assert expected == (
            t.optimizer, t.lr, t.schedule, warmup, t.epochs, t.global_batch_size, r.selection.num_clusters,
            r.data.max_length, t.max_grad_norm, r.data.template,
        )
        assert r.selection.alpha == 1.5 and r.selection.choice == "peripheral" and t.weight_decay == 0
        assert t.allocation == "cluster" and t.normalization == "sample_mean"


def test_check_refuses_what_would_not_run(tmp_path):
    with pytest.raises(ValueError, match="Adafactor at ZeRO stage 2 is not Adafactor: .*no rows and columns to factor"):
        checked(find_recipe("magicoder_7b"), load_recipe("magicoder_7b", ["deepspeed.config=zero2"]))
    with pytest.raises(ValueError, match="global_batch_size 512 is not a multiple of micro_batch_size 4 x 3 ranks = 12"):
        checked(find_recipe("magicoder_7b"), load_recipe("magicoder_7b", ["train.packing=false"]), 3)
    assert "3 ranks share 512 samples" in checked(find_recipe("magicoder_7b"), load_recipe("magicoder_7b"), 3)[0]
    lines = checked(find_recipe("medinstruct_13b"), load_recipe("medinstruct_13b", ["deepspeed.config=zero2"]))
    assert any("warning:" in line and "do not fit into 80 GB" in line for line in lines)
    (tmp_path / "mine.yaml").write_text((RECIPES_DIR / "tiny.yaml").read_text())
    (tmp_path / "mine.sh").write_text("if true; then\n")
    with pytest.raises(ValueError, match="mine.sh is no valid bash"):
        checked(tmp_path / "mine.yaml", load_recipe(str(tmp_path / "mine.yaml")))


def test_another_number_of_devices_is_a_note():
    assert device_note(load_recipe("magicoder_7b"), 4) == []
    (note,) = device_note(load_recipe("magicoder_7b"), 2)
    assert "2 devices where the recipe names 4: 2 ranks share 512 samples a step, in micro-batches of at most 4 packs of 1216" in note
    assert "with 4: 4 ranks share 512 samples a step" in note


def test_the_recipe_command(monkeypatch, capsys):
    def run(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["recipe.py", *words])
        try:
            runpy.run_path(str(ROOT / "launch" / "recipe.py"), run_name="__main__")
        except SystemExit as left:
            assert left.code == code
        printed = capsys.readouterr()
        return printed.out if code == 0 else printed.err

    listed = run("ls")
    assert all(name in listed for name in available_recipes()) and "1221" in listed
    text = run("check", "--all")
    assert f"{len(available_recipes())} recipes are right" in text
    assert "75197 rows, 147 steps an epoch (146 full, one of 445), 294 in all" in text
    assert "magicoder_7b_8gpu: 8 ranks share 512 samples a step" in text and "; ZeRO 0 (zero0), bf16_autocast, adafactor; K = 8" in text
    assert "max_grad_norm: 0" in run("show", "magicoder_7b") and "ratio: 0.5" in run("show", "evol_7b", "--set", "selection.ratio=0.5")
    assert "Adafactor at ZeRO stage 2 is not Adafactor" in run("check", "magicoder_7b", "--set", "deepspeed.config=zero2", code=2)
    assert "give a recipe's name, or --all" in run("check", code=2)


def test_a_copy_is_whole_and_overwrites_nothing(tmp_path):
    folder = tmp_path / "my jobs"
    copy_recipe("evol_7b", folder)
    assert load_recipe(str(folder / "evol_7b.yaml")) == load_recipe("evol_7b")
    text = (folder / "evol_7b.sh").read_text()
    assert f"recipe='{folder / 'evol_7b.yaml'}'\n" in text and f"${{CLUSTER_DS_HOME:-{ROOT}}}" in text
    with pytest.raises(ValueError, match="evol_7b.yaml, .*evol_7b.sh is there already"):
        copy_recipe("evol_7b", folder)


def test_a_copied_job_runs_from_a_spool_folder(tmp_path):
    """sbatch runs a copy under another name; the copy's own YAML decides, and the checkout is found."""
    folder = tmp_path / "jobs"
    copy_recipe("tiny", folder)
    yaml = folder / "tiny.yaml"
    yaml.write_text(yaml.read_text().replace("epochs: 2", "epochs: 5"))
    spool = tmp_path / "spool"
    spool.mkdir()
    shutil.copy(folder / "tiny.sh", spool / "slurm_script")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for cwd, environment in ((elsewhere, {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7"}), (folder, {})):
        code, text = bash(spool / "slurm_script", "--dry_run", cwd=cwd, **environment)
        assert code == 0, text
        assert "2 ranks x 4 samples x 2 micro-batches = 16 a step, 5 epochs" in text


def test_a_shipped_job_finds_the_checkout_above_the_submission(tmp_path):
    shutil.copy(RECIPES_DIR / "magicoder_7b.sh", tmp_path / "slurm_script")
    code, text = bash(tmp_path / "slurm_script", "--dry_run", cwd=tmp_path, SLURM_SUBMIT_DIR=str(ROOT / "recipes"))
    assert code == 0 and "memory of each of 4 GPUs, estimated" in text, text
    code, text = bash(tmp_path / "slurm_script", "--dry_run", cwd=tmp_path)
    assert code != 0 and "CLUSTER_DS_HOME: is not set, and no checkout of cluster-ds is above this folder" in text
    code, text = bash(tmp_path / "slurm_script", "--dry_run", cwd=tmp_path, CLUSTER_DS_HOME=str(ROOT))
    assert code == 0, text


def test_what_is_missing_is_said_before_the_launcher_is_started(tmp_path):
    first = commands(tmp_path / "bin", deepspeed="#!/bin/sh\necho LAUNCHED\n")
    code, text = bash(
        RECIPES_DIR / "magicoder_7b.sh", "--output_dir", str(tmp_path / "run"), cwd=tmp_path, first=first,
        HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="0,1,2,3",
    )
    assert code == 2 and "LAUNCHED" not in text and "Traceback" not in text
    assert "recipe magicoder_7b cannot run here" in text and "MbppPlus-v0.2.0.jsonl" in text


def test_an_allocation_without_hosts_is_refused(tmp_path):
    first = commands(tmp_path / "bin", deepspeed=FAKE.read_text(), scontrol="#!/bin/sh\nexit 1\n", srun=SRUN)
    code, text = bash(
        RECIPES_DIR / "tiny.sh", "--output_dir", str(tmp_path / "run"), cwd=tmp_path, first=first, SLURM_JOB_ID="1",
        SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="n[1-2]",
    )
    assert code == 2 and "error: scontrol names no hosts of SLURM_JOB_NODELIST=n[1-2]" in text and "SRUN" not in text


SCONTROL = '#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && printf "n1\\nn2\\n" && exit\necho "SCONTROL $*"\n'
SRUN = "#!/bin/sh\necho \"SRUN $*\"\n"


def test_several_nodes_are_started_by_srun_from_the_allocation(tmp_path):
    first = commands(tmp_path / "bin", deepspeed=FAKE.read_text(), scontrol=SCONTROL, srun=SRUN)
    code, text = bash(
        RECIPES_DIR / "magicoder_7b.sh", "--output_dir", str(tmp_path / "run"), cwd=tmp_path, first=first, SLURM_JOB_ID="12345",
        SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="n[1-2]", SLURM_GPUS_ON_NODE="4", SLURM_CPUS_PER_TASK="32",
    )
    hostfile = tmp_path / "logs" / "12345" / "hostfile"
    assert hostfile.read_text() == "n1 slots=4\nn2 slots=4\n", text
    (line,) = (line for line in text.splitlines() if line.startswith("SRUN"))
    assert "--nodes 2 --ntasks 2 --ntasks-per-node 1 --kill-on-bad-exit=1 --cpus-per-task 32 bash -c" in line
    assert f"--no_ssh --hostfile {hostfile} --master_addr n1 --enable_each_rank_log {hostfile.parent} --master_port 32345" in line
    assert line.index("--master_port") < line.index("launch/train.py --recipe magicoder_7b")
    assert "note: 8 devices where the recipe names 4: 8 ranks share 512 samples a step" in text


def test_a_dry_run_outside_of_a_job_is_about_the_recipes_devices(tmp_path):
    code, text = bash(RECIPES_DIR / "magicoder_7b.sh", "--dry_run", cwd=ROOT, CUDA_VISIBLE_DEVICES="0,1,2")
    assert code == 0 and "4 ranks share 512 samples a step" in text, text
    code, text = bash(RECIPES_DIR / "magicoder_7b.sh", "--dry", cwd=ROOT)
    assert code != 0 and "unrecognized arguments: --dry" in text


EVALUATE = """
set -euo pipefail
CLUSTER_DS_HOME={root}
. "$CLUSTER_DS_HOME/launch/job.sh"
PYTHON={fake}
cds_evaluate tiny --output_dir here
"""


def test_usr1_during_the_evaluation_puts_the_job_into_the_queue(tmp_path):
    """An evaluation keeps its answers, so it is ended and the job starts again."""
    fake = commands(tmp_path / "bin", python="#!/bin/sh\necho STARTED $*\nsleep 60\n", scontrol=SCONTROL)
    script = tmp_path / "job"
    script.write_text(EVALUATE.format(root=ROOT, fake=f"{fake}/python"))
    environment = {**os.environ, "PATH": f"{fake}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", str(script)], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
    assert job.stdout.readline() == f"STARTED {ROOT}/eval/run.py --recipe tiny --output_dir here\n"
    job.send_signal(signal.SIGUSR1)
    text, _ = job.communicate(timeout=20)
    assert job.returncode == 75 and "SCONTROL requeue 7" in text
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\nexit 3\n")
    assert subprocess.run(["bash", str(script)], env=environment, cwd=tmp_path).returncode == 3
