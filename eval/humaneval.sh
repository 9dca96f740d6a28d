#!/usr/bin/env bash
# HumanEval and HumanEval+ of a model (base tests alone, labelled so, where EvalPlus's data are not to be had).
#   bash eval/humaneval.sh MODEL [--limit N] [--output_dir DIR] [...]; --help lists the rest. MODEL: a run's folder or its model/.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$root/launch/setup.sh"
cds_setup --eval
exec "$PYTHON" "$root/eval/code_benchmarks.py" humaneval "$@"
