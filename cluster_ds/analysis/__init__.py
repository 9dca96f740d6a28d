"""Beside the stages: what the paper's tables and figures show, for any run: `python -m cluster_ds.analysis NAME RUN`."""
