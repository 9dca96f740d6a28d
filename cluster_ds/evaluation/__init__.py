"""Evaluation: answers to benchmark problems, their score in a sandbox, and the files that hold both."""
