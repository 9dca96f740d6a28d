#!/usr/bin/env bash
# The whole path on a 2.5M-parameter model in under a minute, once the model is pretrained; the tests use this recipe.
#   bash recipes/tiny.sh [--set KEY=VALUE ...] [--output_dir DIR]
set -euo pipefail
CLUSTER_DS_HOME="${CLUSTER_DS_HOME:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"
export CLUSTER_DS_HOME
. "$CLUSTER_DS_HOME/launch/setup.sh"
cds_setup
. "$CLUSTER_DS_HOME/launch/job.sh"

export DS_ACCELERATOR=cpu
NUM_CPU_RANKS=2 cds_train tiny "$@"
