#!/usr/bin/env bash
# Set up and run the tests: bash tests/run.sh [pytest arguments]. Without arguments it runs everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/setup.sh
cds_setup --dev --quickstart
exec "$PYTHON" -m pytest "$@"
