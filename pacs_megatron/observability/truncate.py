"""Removes the metrics and rollouts after a checkpoint."""

from pathlib import Path

from pacs_megatron.observability.metrics import truncate_metrics
from pacs_megatron.observability.rollout_log import truncate_rollouts


def truncate_after(run_dir: Path, step: int) -> None:
    """Remove metrics and rollouts after `step`, the step of the checkpoint that the run resumes from.

    `step = -1` (no checkpoint) removes every row, including that of the evaluation before step 1. Idempotent: after a
    kill the next call completes the work.
    """
    truncate_metrics(run_dir, step)
    truncate_rollouts(run_dir, step)
