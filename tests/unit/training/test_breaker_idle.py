"""Steps that train nothing: their reason, and the error of a run that has not trained at all."""

from __future__ import annotations

from typing import Any

import pytest

from pacs_megatron.errors import RolloutError
from pacs_megatron.training.breaker import check_idle, idle_reason
from pacs_megatron.training.progress import RunProgress

DROPPED = {
    "admission/num_groups": 0.0,
    "admission/dropped_one_class_groups": 12.0,
    "admission/dropped_small_groups": 4.0,
    "admission/dropped_truncated": 0.0,
}
ZERO = {"admission/num_groups": 4.0, "optimizer/grad_norm": 0.0, "reward/label_mean": 0.0}
TRAINED = {"admission/num_groups": 4.0, "optimizer/grad_norm": 0.5}


def test_reasons() -> None:
    assert idle_reason(DROPPED) == (
        "admission dropped every group (one_class_groups: 12, small_groups: 4)"
    )
    zero = idle_reason(ZERO)
    assert zero is not None and zero.startswith("every gradient is 0 (mean label 0.0)")
    assert idle_reason(TRAINED) is None
    assert idle_reason({}) is None  # the evaluation before training
    assert idle_reason({**ZERO, "critic/grad_norm": 0.1}) is None  # the warm-up of a critic


def progress_after(rows: list[dict[str, Any]]) -> RunProgress:
    progress = RunProgress(row={})
    for row in rows:
        progress.complete_step(row)
    return progress


def test_the_first_steps_without_training_are_counted() -> None:
    assert progress_after([]).idle_steps == 0
    assert progress_after([DROPPED, ZERO]).idle_steps == 2
    assert progress_after([DROPPED, TRAINED, DROPPED]).idle_steps is None


def test_a_run_that_trains_nothing_ends() -> None:
    for count in range(3):
        check_idle(count, DROPPED, count, limit=3)
    with pytest.raises(
        RolloutError, match=r"step 3: the first 3 steps have trained nothing, admission dropped"
    ):
        check_idle(3, DROPPED, 3, limit=3)


@pytest.mark.parametrize(
    ("row", "idle_steps", "limit"), [(DROPPED, None, 3), (DROPPED, 99, None), ({}, 99, 3)]
)
def test_runs_that_continue(
    row: dict[str, float], idle_steps: int | None, limit: int | None
) -> None:
    check_idle(99, row, idle_steps, limit)
