"""Further samples of difficult prompts within a step (DARS, arXiv:2508.13755).

A prompt of accuracy p, the share of correct ones of its N samples, has the summed advantages N S
with S = 2 p (1 - p), or S = 2 sqrt(p (1 - p)) for advantages that are divided by the deviation. At
p = 1/2 the sum has its peak, N / 2 or N. A prompt with p < 1/2 gets so many further samples that
its sum is the peak (`equal`), or 2 (1 - p) times the peak (`hardness`). The formulas are those of
yangzhch6/DARS, commit 9b21b71 (`schedule_ET` and `schedule_HW` in
verl/verl/trainer/ppo/ray_dars_trainer.py).
"""

import math
from collections.abc import Sequence

from pacs_megatron.config.schema import ResampleOptions
from pacs_megatron.contracts import Sample


def num_extra_samples(accuracy: float, num_samples: int, options: ResampleOptions) -> int:
    """Number of further samples of a prompt.

    Args:
        accuracy: share of its samples with label 1; 0 counts as half a correct sample.
        num_samples: N, its samples so far.
        options: the schedule and the largest group.
    """
    p = accuracy or 0.5 / num_samples
    if p >= 0.5:
        return 0

    of_sample = 2 * p * (1 - p)
    peak = 0.5 * num_samples
    if options.by_std:
        of_sample = 2 * math.sqrt(p * (1 - p))
        peak = float(num_samples)
    goal = peak if options.schedule == "equal" else 2 * (1 - p) * peak
    num_missing = math.ceil((goal - num_samples * of_sample) / of_sample)
    return min(num_missing, options.max_samples - num_samples)


def accuracy_of(samples: Sequence[Sample]) -> float | None:
    """Share of judged samples with label 1; None if the verifier judged none."""
    labels = [sample.label for sample in samples if sample.label is not None]
    return sum(labels) / len(labels) if labels else None


def is_rescued(samples: Sequence[Sample], num_first: int) -> bool:
    """Whether only further samples, those after the first `num_first`, have label 1."""
    labels = [sample.label == 1 for sample in samples]
    return any(labels) and not any(labels[:num_first])
