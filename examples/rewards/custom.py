"""A reward function for `reward.name: custom`: a right answer, and the share of right digits.

`extra_columns` of the data set become `sample.extra`.
"""

import re

from pacs_megatron.contracts import Judgement, RewardSample


def reward(sample: RewardSample) -> float | Judgement:
    """1.0 for the right number in the last box; less for a wrong number with right digits."""
    boxes = re.findall(r"\\boxed\{(\d+)\}", sample.response)
    if not boxes:
        return 0.0
    if boxes[-1] == sample.answer:
        return 1.0

    pairs = zip(reversed(boxes[-1]), reversed(sample.answer), strict=False)
    right = sum(digit == expected for digit, expected in pairs)
    return Judgement(0.5 * right / len(sample.answer), {"right_digits": right})
