"""HumanEval and MBPP: `python eval/code_benchmarks.py humaneval MODEL`; eval/humaneval.sh and eval/mbpp.sh set up first."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.evaluation.command import code_main

if __name__ == "__main__":
    code_main()
