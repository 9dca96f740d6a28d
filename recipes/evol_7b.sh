#!/usr/bin/env bash
#SBATCH --job-name=evol_7b
# more nodes: change the next line alone
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=250G
#SBATCH --time=24:00:00
#SBATCH --requeue
# 5 minutes before the time is up: a checkpoint, then into the queue again
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# CodeLlama-Python-7B on Evol-Instruct-Code: AdamW, four 80 GB GPUs; then HumanEval and MBPP.
#   bash recipes/evol_7b.sh [--dry_run] [--set KEY=VALUE ...] [--output_dir DIR]     or sbatch, here or as a copy elsewhere
set -euo pipefail
recipe=evol_7b

# The checkout: $CLUSTER_DS_HOME, else above the folder of the submission, else above this script (sbatch runs a copy of it).
for dir in "${SLURM_SUBMIT_DIR:-$PWD}" "$(dirname "${BASH_SOURCE[0]}")"; do
    dir="$(cd "$dir" && pwd)"
    while [ -z "${CLUSTER_DS_HOME:-}" ] && [ "$dir" != / ]; do
        [ ! -f "$dir/cluster_ds/recipe.py" ] || CLUSTER_DS_HOME="$dir"
        dir="$(dirname "$dir")"
    done
done
. "${CLUSTER_DS_HOME:?is not set, and no checkout of cluster-ds is above this folder: set it to one}/launch/job.sh"

cds_setup --eval
cds_train "$recipe" "$@"    # ZeRO config: ds_configs/zero2.json
cds_evaluate "$recipe" "$@"
