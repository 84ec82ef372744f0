"""One warning when more than half of the updates are clipped."""

from __future__ import annotations

import pytest

from pacs_megatron.training.clipping import MIN_STEPS, ClippingWarning


def warnings_of(shares: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    watch = ClippingWarning()
    watch.add({"step": 0, "eval/test/pass@1": 0.3})
    for step, share in enumerate(shares, 1):
        watch.add({"step": step, "optimizer/clipped_frac": share})
    return [record.getMessage() for record in caplog.records]


def test_the_warning_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    [line] = warnings_of([1.0, 0.5] * MIN_STEPS, caplog)
    assert f"step {MIN_STEPS}: 75 % of the updates" in line and "objective.clip_grad" in line


@pytest.mark.parametrize("shares", [[1.0] * (MIN_STEPS - 1), [0.0, 1.0] * MIN_STEPS, [0.5] * MIN_STEPS])
def test_no_warning_for_a_short_run_or_for_half_of_the_updates(
    shares: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(shares, caplog) == []
