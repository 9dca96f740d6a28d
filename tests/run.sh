#!/usr/bin/env bash
# Set up and run the tests: bash tests/run.sh [pytest arguments].
# Without arguments it runs all but those marked slow, as many files at a time as there are cores, at most four.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/setup.sh
cds_setup --dev --quickstart
if [ "$#" -eq 0 ]; then
    cores="$(getconf _NPROCESSORS_ONLN)"
    set -- -n "$((cores < 4 ? cores : 4))" --dist loadfile
    export OMP_NUM_THREADS=1 # threads that spin while they wait would hold the cores of the other files
fi
exec "$PYTHON" -m pytest "$@"
