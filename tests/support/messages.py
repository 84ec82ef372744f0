"""The text that a command writes to its standard error."""

from __future__ import annotations

import re

_NOTICE = re.compile(r"(?:\S+ \S+ \[[^\]]+\] WARNING )?waiting ")
"""with the start of a line of the log, or without"""


def error_lines(text: str) -> list[str]:
    """The lines without the notices of long waits, which a slow host gives too."""
    return [line for line in text.splitlines() if not _NOTICE.match(line)]
