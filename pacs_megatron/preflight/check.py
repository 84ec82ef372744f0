"""One line of `preflight`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pacs_megatron.errors import PacsError

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line."""

    level: Level
    key: str
    """The configuration key to change, or what was looked at."""
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.key}: {self.message}{f' -> {self.fix}' if self.fix else ''}"


def attempt(key: str, action: Callable[[], str], fix: str = "") -> Check:
    """`ok` with what `action` returns, or `fail` with its named error, which brings its own fix.

    A file or folder that the system does not let us read is a failure too.
    """
    try:
        return Check("ok", key, action())
    except PacsError as error:
        return Check("fail", key, " ".join(str(error).split("\n")), fix)
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        return Check("fail", key, text, fix or "correct the path or its permissions")


def existing_parent(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())


def is_there(path: str) -> bool:
    """Whether there is such a file or folder that we may see."""
    try:
        return Path(path).expanduser().exists()
    except OSError:
        return False
