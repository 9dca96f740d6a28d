"""Beside the stages: arms of one recipe at equal budget, trained one after another, and what their losses say."""
