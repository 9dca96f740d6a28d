#!/usr/bin/env bash
# MedQA, MedMCQA, PubMedQA and the six medical subjects of MMLU of a model.
#   bash eval/medqa.sh MODEL [--limit N] [--output_dir DIR] [...]; --help lists the rest. MODEL: a run's folder or its model/.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$root/launch/setup.sh"
cds_setup --eval
exec "$PYTHON" "$root/eval/medical_benchmarks.py" "$@"
