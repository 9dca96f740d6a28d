"""Stage 5b: what CluSTER is compared with: one module each, each ending in an ordinary plan.

A module's `select` makes the plan on rank 0; where scores are needed first, its `score` makes them on all ranks and keeps
them on disk, so that they are made once for all seeds and budgets.
"""
