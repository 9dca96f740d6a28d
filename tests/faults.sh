#!/usr/bin/env bash
# One run of tiny that is killed 30 times with -9, at every stage, against an unbroken one: bash tests/faults.sh [SEED] [KILLS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/setup.sh
cds_setup --dev --quickstart
exec "$PYTHON" -m tests.distributed.faults "$@"
