"""One result line of `preflight` and `doctor`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pacs_megatron.errors import PacsError

Level = Literal["ok", "none", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One result line."""

    level: Level
    key: str
    """The configuration key to change, or the subject of the check."""
    message: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<4}  {self.key}: {self.message}"
        return f"{line} -> {self.fix}" if self.fix else line


def judged(
    key: str, is_good: bool, message: str, fix: str = "", otherwise: Level = "fail"
) -> Check:
    """`ok`, or the level `otherwise` with the fix."""
    if is_good:
        return Check("ok", key, message)
    return Check(otherwise, key, message, fix)


def attempt(key: str, action: Callable[[], str], fix: str = "") -> Check:
    """`ok` with the text that `action` returns, or `fail`.

    Args:
        key: of the check.
        action: raises PacsError, whose text contains a fix, or OSError for an unreadable file or
            folder.
        fix: in addition to that of the error.
    """
    try:
        return Check("ok", key, action())
    except PacsError as error:
        one_line = " ".join(str(error).split("\n"))
        return Check("fail", key, one_line, fix)
    except OSError as error:
        text = str(error)
        if error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        return Check("fail", key, text, fix or "correct the path or its permissions")
