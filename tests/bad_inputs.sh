#!/usr/bin/env bash
# Wrong recipes, data, models and folders: each with its exit code and message. Fails if one is not refused as it should be.
#   bash tests/bad_inputs.sh [PART OF A NAME]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/setup.sh
cds_setup --dev --quickstart
exec "$PYTHON" -m tests.bad_inputs "$@"
