"""From a reward to a label, and how many unjudged samples a step may have."""

import math
from collections.abc import Collection

from pacs_megatron.errors import RewardError


def label_of(reward: float, threshold: float | None) -> int:
    """1 or 0: `reward >= threshold`; without a threshold the reward itself.

    Raises RewardError for NaN and infinities, and without a threshold for anything but 0 and 1.
    """
    if not math.isfinite(reward):
        raise RewardError(f"reward is {reward}, expected a finite number; repair the reward function")
    if threshold is not None:
        return int(reward >= threshold)
    if reward not in (0.0, 1.0):
        raise RewardError(f"reward is {reward}, expected 0 or 1; set reward.label_threshold to turn it into a label")
    return int(reward)


def check_failures(failures: Collection[str], num_samples: int, max_failure_frac: float) -> None:
    """Raises RewardError when more than `max_failure_frac` of a step's samples were not judged.

    `failures` holds one reason for each of them, `num_samples` counts judged and unjudged together.
    """
    if len(failures) > max_failure_frac * num_samples:
        raise RewardError(
            f"{len(failures)} of {num_samples} samples of this step could not be judged "
            f"(share {len(failures) / num_samples:.3f}, reward.max_failure_frac={max_failure_frac}); "
            f"first reason: {next(iter(failures))}; repair the data or reward, or raise reward.timeout_s"
        )
