#!/usr/bin/env bash
# MBPP and MBPP+ of a model (EvalPlus's 378 tasks).
#   bash eval/mbpp.sh MODEL [--limit N] [--output_dir DIR] [...]; --help lists the rest. MODEL: a run's folder or its model/.
set -euo pipefail

# The checkout: $CLUSTER_DS_HOME, else above the folder of the submission, else above this script (sbatch runs a copy of it).
for dir in "${SLURM_SUBMIT_DIR:-$PWD}" "$(dirname "${BASH_SOURCE[0]}")"; do
    dir="$(cd "$dir" && pwd)"
    while [ -z "${CLUSTER_DS_HOME:-}" ] && [ "$dir" != / ]; do
        [ ! -f "$dir/cluster_ds/recipe.py" ] || CLUSTER_DS_HOME="$dir"
        dir="$(dirname "$dir")"
    done
done
. "${CLUSTER_DS_HOME:?is not set, and no checkout of cluster-ds is above this folder: set it to one}/launch/setup.sh"

cds_setup --eval
exec "$PYTHON" "$CLUSTER_DS_HOME/eval/code_benchmarks.py" mbpp "$@"
