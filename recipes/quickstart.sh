#!/usr/bin/env bash
# The product's main job on this machine: a real model, real data, two CPU ranks. Sets itself up on first use.
#   bash recipes/quickstart.sh [--set KEY=VALUE ...] [--output_dir DIR]
set -euo pipefail
CLUSTER_DS_HOME="${CLUSTER_DS_HOME:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"
export CLUSTER_DS_HOME
. "$CLUSTER_DS_HOME/launch/setup.sh"
cds_setup --quickstart
. "$CLUSTER_DS_HOME/launch/job.sh"

export DS_ACCELERATOR=cpu # the quickstart is the same with and without GPUs
NUM_CPU_RANKS=2 cds_train quickstart "$@"
