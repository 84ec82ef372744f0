r"""The answer of a response: the content of its last complete `\boxed{...}`."""

import re

_OPEN = re.compile(r"\\boxed\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces close, stripped; None if there is none. Linear in len(text)."""
    for start in reversed([match.end() for match in _OPEN.finditer(text)]):
        end = _closing_brace(text, start)
        if end is not None:
            return text[start:end].strip()
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one before `start`; skips escaped braces (`\\{`)."""
    depth = 1
    for match in _BRACES.finditer(text, start):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None
