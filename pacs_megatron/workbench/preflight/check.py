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
        return f"{self.level:<4}  {self.key}: {self.message}{f' -> {self.fix}' if self.fix else ''}"


def judged(
    key: str, is_good: bool, message: str, fix: str = "", otherwise: Level = "fail"
) -> Check:
    """`ok`, or the level `otherwise` with the fix."""
    return Check("ok", key, message) if is_good else Check(otherwise, key, message, fix)


def attempt(key: str, action: Callable[[], str], fix: str = "") -> Check:
    """`ok` with the text that `action` returns, or `fail` with its PacsError, which contains the
    fix.

    An unreadable file or folder is also a failure.
    """
    try:
        return Check("ok", key, action())
    except PacsError as error:
        return Check("fail", key, " ".join(str(error).split("\n")), fix)
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        return Check("fail", key, text, fix or "correct the path or its permissions")
