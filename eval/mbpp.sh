#!/usr/bin/env bash
# MBPP and MBPP+ of a model (EvalPlus's 378 tasks).
#   bash eval/mbpp.sh MODEL [--limit N] [--output_dir DIR] [...]; --help lists the rest. MODEL: a run's folder or its model/.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$root/launch/setup.sh"
cds_setup --eval
exec "$PYTHON" "$root/eval/code_benchmarks.py" mbpp "$@"
