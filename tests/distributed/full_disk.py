"""Run inside `unshare --user --map-root-user --mount`: python -m tests.distributed.full_disk FOLDER SIZE [--blind] [--go_on] [--then]

Mounts a file system of that size on FOLDER and runs the tiny recipe in it as one process. With --blind the free space looks
endless, so that a write fails in the middle as on a disk that somebody else fills. With --then the disk grows afterwards, and
the same command runs again; the model is copied out to FOLDER_model. Prints the exit codes.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from .jobs import ROOT

BLIND = """
import runpy, shutil, sys
usage = shutil.disk_usage
shutil.disk_usage = lambda path: usage(path)._replace(free=10**15)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> None:
    folder, size, *flags = sys.argv[1:]
    settings = ["train.full_disk=go_on"] if "--go_on" in flags else []
    settings += ["train.epochs=1", "train.checkpoint_every=100", "evaluate.held_out=null"]
    command = [str(ROOT / "launch" / "train.py"), "--recipe", "tiny", "--output_dir", f"{folder}/run"]
    command += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    blind = ["-c", BLIND] if "--blind" in flags else []
    print("exit code", subprocess.run([sys.executable, *blind, *command], timeout=300).returncode, flush=True)
    left = sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if ".part" in p.name)
    print("left over:", ", ".join(left) or "nothing", flush=True)
    if "--then" in flags:
        subprocess.run(["mount", "-o", "remount,size=1g", folder], check=True)
        print("exit code", subprocess.run([sys.executable, *command], timeout=300).returncode, flush=True)
        shutil.copytree(f"{folder}/run/model", f"{folder}_run/model")


if __name__ == "__main__":
    main()
