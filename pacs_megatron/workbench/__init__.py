"""Around a run: plans, checks, certificates, evaluations, comparisons and the paper's tables."""
