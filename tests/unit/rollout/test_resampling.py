"""Numbers of further samples by hand; `tests/golden` compares them with the authors' functions."""

from __future__ import annotations

import pytest

from pacs_megatron.config.schema import ResampleOptions
from pacs_megatron.rollout.resampling import num_extra_samples


@pytest.mark.parametrize(
    ("accuracy", "schedule", "by_std", "expected"),
    [
        # N = 8. p = 1/4: S = 3/8, the sum is 3 of the peak 4, and each sample adds 3/8: 2.67 of
        # them. With twice 3/4 of the peak, 6: 3 / (3/8) = 8.
        (0.25, "equal", False, 3),
        (0.25, "hardness", False, 8),
        # S = sqrt(3/4), the sum is 6.93 of 8: 1.24; of 12: 5.86.
        (0.25, "equal", True, 2),
        (0.25, "hardness", True, 6),
        # p = 1/16: S = 15/128, the sum is 15/16 of 4: 26.1 more, but a group has at most 32.
        (0.0, "equal", False, 24),
        # Of 7.5: 56.
        (0.0, "hardness", False, 56),
        (0.5, "hardness", False, 0),
        (1.0, "equal", False, 0),
    ],
)
def test_by_hand(accuracy: float, schedule: str, by_std: bool, expected: int) -> None:
    options = ResampleOptions.model_validate({"schedule": schedule, "by_std": by_std})
    assert num_extra_samples(accuracy, 8, options) == expected
