"""A warning at the end of an attempt when more than half of the updates were clipped."""

from __future__ import annotations

import pytest

from pacs_megatron.objectives.grpo import GrpoOptions
from pacs_megatron.training.breaker import warn_of_clipping


def warnings_of(
    shares: list[float], caplog: pytest.LogCaptureFixture, clip_grad: float = 0.5
) -> list[str]:
    warn_of_clipping(shares, GrpoOptions(name="grpo", clip_grad=clip_grad))
    return [record.getMessage() for record in caplog.records]


def test_more_than_half_of_the_updates_clipped_gives_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    [line] = warnings_of([1.0, 0.5], caplog)
    assert "75 % of the updates" in line and "objective.clip_grad=0.5" in line
    assert "lr" not in line, "Adam's rate does not change the norm"


@pytest.mark.parametrize("shares", [[], [0.0], [1.0, 0.0], [0.5, 0.5]])
def test_no_warning_for_half_of_the_updates_or_less(
    shares: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(shares, caplog) == []


def test_no_warning_of_the_default(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of([1.0, 1.0], caplog, clip_grad=1.0) == []
