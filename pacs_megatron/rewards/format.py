"""A regular expression over the whole response."""

import re

from pacs_megatron.config.reward_options import FormatReward
from pacs_megatron.contracts import Prompt, RewardFn

_OPENED = re.compile(r"<[A-Za-z][\w-]*>\s*\Z")
"""An opening tag at the end of a prompt, such as `<think>`: the chat template has written it."""


def build(options: FormatReward) -> RewardFn:
    """1.0 if the whole response matches `pattern` (re.DOTALL), else 0.0.

    Where the chat template ends the prompt with an opening tag (`<think>`), the response matches
    with or without it before its text. Ignores the gold answer.
    """
    pattern = re.compile(options.pattern, re.DOTALL)

    def matches(prompt: Prompt, response: str) -> float:
        opened = _OPENED.search(prompt.text)
        texts = [response] if opened is None else [response, opened[0] + response]
        return float(any(pattern.fullmatch(text) is not None for text in texts))

    return matches
