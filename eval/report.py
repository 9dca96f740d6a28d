"""One Markdown table of several runs: `python eval/report.py [LABEL=]RUN ...`; runs of one label are seeds of one thing."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.evaluation.command import refusing
from cluster_ds.evaluation.report import report

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="a run's folder, or one with results.json below it")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table there as well")
    args = parser.parse_args()
    refusing(lambda: report(args.runs, args.output))
