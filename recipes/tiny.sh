#!/usr/bin/env bash
# The whole path on a 2.5M-parameter model in under a minute, once the model is pretrained; the tests use this recipe.
#   bash recipes/tiny.sh [--set KEY=VALUE ...] [--output_dir DIR]
set -euo pipefail
recipe=tiny

# The checkout: $CLUSTER_DS_HOME, else above the folder of the submission, else above this script (sbatch runs a copy of it).
for dir in "${SLURM_SUBMIT_DIR:-$PWD}" "$(dirname "${BASH_SOURCE[0]}")"; do
    dir="$(cd "$dir" && pwd)"
    while [ -z "${CLUSTER_DS_HOME:-}" ] && [ "$dir" != / ]; do
        [ ! -f "$dir/cluster_ds/recipe.py" ] || CLUSTER_DS_HOME="$dir"
        dir="$(dirname "$dir")"
    done
done
. "${CLUSTER_DS_HOME:?is not set, and no checkout of cluster-ds is above this folder: set it to one}/launch/job.sh"

cds_setup
export DS_ACCELERATOR=cpu NUM_CPU_RANKS="${NUM_CPU_RANKS:-2}" # the same with and without GPUs
cds_train "$recipe" "$@"
