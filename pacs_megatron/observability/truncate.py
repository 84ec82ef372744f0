"""Cuts a run folder back to a checkpoint."""

from pathlib import Path

from pacs_megatron.observability.metrics import truncate_metrics
from pacs_megatron.observability.rollout_log import truncate_rollouts


def truncate_after(run_dir: Path, step: int) -> None:
    """Cut metrics and rollouts back to `step`, the step of the checkpoint that the run resumes from.

    `step = -1` (no checkpoint, start over) removes every row, also that of the evaluation before step 1. Idempotent:
    a kill in the middle is cured by the next call.
    """
    truncate_metrics(run_dir, step)
    truncate_rollouts(run_dir, step)
