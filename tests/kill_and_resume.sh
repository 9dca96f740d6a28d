#!/usr/bin/env bash
# The tiny recipe on 2 ranks, one of them killed with -9 at a random step, started again: bash tests/kill_and_resume.sh [SEED]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/setup.sh
cds_setup --dev --quickstart
exec "$PYTHON" -m tests.distributed.kill_and_resume "$@"
