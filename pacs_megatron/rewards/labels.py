"""Converts rewards to numbers and labels, and limits the unjudged samples of a step."""

import math
import re
from collections.abc import Collection
from numbers import Real
from typing import Any

import numpy as np

from pacs_megatron.errors import RewardError

_TIME_LIMIT = re.compile(r"\bwithin [\d.e+-]+ s\b")
"""Part of a reason that names a time limit"""


def as_reward(value: Any) -> float:
    """The number that a reward function returned: a Python or NumPy scalar.

    Raises RewardError unless it is finite.
    """
    number = value
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        number = value.item()
    if not isinstance(number, Real):
        raise RewardError(f"returned {type(value).__name__}, expected a number")
    try:
        reward = float(number)
    except OverflowError as error:
        raise RewardError(
            "returned an integer that no 64-bit float can represent, expected a finite number"
        ) from error
    if not math.isfinite(reward):
        raise RewardError(f"the reward is {reward}, expected a finite number")
    return reward


def label_of(reward: float, threshold: float | None) -> int:
    """1 if `reward >= threshold`, else 0; without a threshold the reward itself.

    Raises RewardError unless the reward is finite and, without a threshold, 0 or 1.
    """
    if not math.isfinite(reward):
        raise RewardError(
            f"reward is {reward}, expected a finite number; correct the reward function"
        )
    if threshold is not None:
        return int(reward >= threshold)
    if reward not in (0.0, 1.0):
        raise RewardError(
            f"reward is {reward}, expected 0 or 1; set reward.label_threshold to turn it into a "
            "label"
        )
    return int(reward)


def check_failures(
    failures: Collection[str], num_samples: int, max_failure_frac: float, then: str = ""
) -> None:
    """Raises RewardError if too many samples of a step are unjudged.

    Args:
        failures: their reasons.
        num_samples: of the step.
        max_failure_frac: the share of samples that may be unjudged.
        then: the end of the message, a further fix.
    """
    if len(failures) > max_failure_frac * num_samples:
        reason = next(iter(failures))
        fix = "correct the data or the reward"
        if _TIME_LIMIT.search(reason):
            fix += ", or raise reward.timeout_s"
        raise RewardError(
            f"{len(failures)} of {num_samples} samples of this step could not be judged (share "
            f"{len(failures) / num_samples:.3f}, reward.max_failure_frac={max_failure_frac}); "
            f"first reason: {reason}; {fix}{then}"
        )
