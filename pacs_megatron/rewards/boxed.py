r"""The answer of a response: the content of its last complete `\boxed{...}`."""

import re

_OPEN = re.compile(r"\\boxed\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
"""a brace, or an escaped character, which is skipped"""


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces close, stripped; None if there is none.

    Linear in len(text) if the last box closes.
    """
    starts = [match.end() for match in _OPEN.finditer(text)]
    for start in reversed(starts):
        depth = 1
        for match in _BRACES.finditer(text, start):
            if match[0] == "{":
                depth += 1
            elif match[0] == "}":
                depth -= 1
            if depth == 0:
                return text[start : match.start()].strip()
    return None
