"""A regular expression over the whole response."""

import re

from pacs_megatron.contracts import Prompt


class Format:
    """1.0 if the whole response matches `pattern` (re.DOTALL), else 0.0. Ignores the gold answer."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, prompt: Prompt, response: str) -> float:
        return float(self._pattern.fullmatch(response) is not None)
