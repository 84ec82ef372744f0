"""Training objectives: pure functions from per-token log-probs and verified labels to a loss.

They use no process groups.
"""
