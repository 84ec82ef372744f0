"""A regular expression over the whole response."""

import re

from pacs_megatron.config.reward_options import FormatReward
from pacs_megatron.contracts import Prompt, RewardFn


def build(options: FormatReward) -> RewardFn:
    """1.0 if the whole response matches `pattern` (re.DOTALL), else 0.0.

    Ignores the gold answer.
    """
    pattern = re.compile(options.pattern, re.DOTALL)

    def matches(_prompt: Prompt, response: str) -> float:
        return float(pattern.fullmatch(response) is not None)

    return matches
