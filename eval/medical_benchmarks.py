"""Medical questions: `python eval/medical_benchmarks.py MODEL`; eval/medqa.sh sets up first."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.evaluation.command import medical_main

if __name__ == "__main__":
    medical_main()
