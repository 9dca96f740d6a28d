#!/usr/bin/env bash
# The GPU-marked tests, then extraction and packed training of a 7B-shaped model with random weights, on one GPU with 80 GB or
# more, meant to take under four minutes: bash benchmarks/gpu.sh [RESULT.json] [--tiny]. Nothing is downloaded.
# Needs beyond torch and transformers: deepspeed, peft, datasets, pyarrow, scikit-learn, scipy, pydantic, pyyaml, rich, tqdm, psutil,
# safetensors, sentencepiece, gguf, threadpoolctl, ninja, pytest, hypothesis; flash-attn is used where it is installed. The
# checkout itself need not be installed.
set -euo pipefail
result="$PWD/gpu.json"
flags=()
for argument in "$@"; do
  case "$argument" in
    --*) flags+=("$argument") ;;
    *) result="$(realpath -m "$argument")" ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
"$python" -m pytest -q -p no:cacheprovider -m gpu tests/test_gpu.py "--junitxml=$work/tests.xml" || true # failures are in the result
"$python" benchmarks/gpu.py --json "$result" --tests "$work/tests.xml" "${flags[@]}"
