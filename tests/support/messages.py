"""The text that a command writes to its standard error."""

from __future__ import annotations


def error_lines(text: str) -> list[str]:
    """The lines without the notices of long waits, which a slow host gives too."""
    return [line for line in text.splitlines() if not line.startswith("waiting ")]
