"""Named errors. The command line prints one as a single line and exits with its code.

A message names the problem, its place, the value, the expected value and the fix.
"""

import difflib
import re
from collections.abc import Iterable
from enum import IntEnum

_BIDIRECTIONAL = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
"""They change the order in which a terminal shows the letters around them."""
_UNSAFE_LINE = re.compile(f"[\x00-\x1f\x7f-\x9f\u2028\u2029{_BIDIRECTIONAL}]")
_UNSAFE_TEXT = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDIRECTIONAL}]")


class ExitCode(IntEnum):
    """Exit codes of every `pacs-megatron` command; batch scripts branch on them."""

    OK = 0
    FAILED = 1
    MISCONFIGURED = 2
    HANG = 70
    PREEMPTED = 75
    """State saved after a signal; run the same command again (EX_TEMPFAIL of sysexits.h)."""


def one_line(text: str) -> str:
    """`text` on one line: line ends become spaces, other unprintable characters escapes."""
    joined = " ".join(line for line in text.splitlines() if line)
    return "".join(map(_printable, joined))


def _printable(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()


def terminal_line(text: str) -> str:
    """`text` with escapes for characters that end a line, move the cursor or reorder letters."""
    return _UNSAFE_LINE.sub(_escaped, text)


def terminal_text(text: str) -> str:
    """Same as `terminal_line`; tabs and line ends stay."""
    return _UNSAFE_TEXT.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def shown(value: object, limit: int = 60) -> str:
    """A value in a message: printable, on one line, cut after `limit` characters."""
    # A string is cut before repr too, which would copy gigabytes; "+ 2" is for its quotes.
    text = repr(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit + 2 else f"{text[:limit]}..."


def did_you_mean(word: str, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name: `; did you mean X?`, empty without a like one.

    Capitals do not matter.

    Args:
        word: The unknown name.
        names: The known ones.
        cutoff: Least similarity, 0 to 1.
    """
    by_letters = {name.casefold(): name for name in names if name != word}
    close = difflib.get_close_matches(word.casefold(), list(by_letters), n=1, cutoff=cutoff)
    return f"; did you mean {by_letters[close[0]]}?" if close else ""


class PacsError(Exception):
    """Base of all errors that a user can cause or fix."""

    exit_code: ExitCode = ExitCode.FAILED

    def __str__(self) -> str:
        return one_line(super().__str__())


class ConfigError(PacsError):
    """Invalid configuration. Nothing was started or written."""

    exit_code = ExitCode.MISCONFIGURED


class DataError(PacsError):
    """A data file, data set, tokenizer or chat template is missing or malformed."""

    exit_code = ExitCode.MISCONFIGURED


class RewardError(PacsError):
    """A reward function failed on a response. The sample is dropped and counted, not labelled 0."""


class AgentError(PacsError):
    """An agent failed on a trajectory, which ends without a verdict, or its workers ended."""


class ToolError(PacsError):
    """A tool of an agent failed on a call.

    The text is the result of the call, or the reason why the trajectory has no verdict.
    """


class ConnectError(PacsError):
    """The ranks cannot connect to each other.

    Args:
        action: The action that failed, the start of the message.
        cause: Its error, of a store, of gloo or of NCCL; the message has its first line.
    """

    def __init__(self, action: str, cause: object) -> None:
        first_line = str(cause).partition("\n")[0][:300]
        checks = "MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and `ulimit -n`"
        super().__init__(
            f"{action}: {first_line}; if another rank ended, its message has the cause; otherwise "
            f"check {checks}"
        )


class RolloutError(PacsError):
    """The rollout engine or the driver failed or returned an invalid response."""


class SyncError(PacsError):
    """A weight update is incomplete.

    The rollout engine must not sample before the next complete one.
    """


class CheckpointError(PacsError):
    """A checkpoint is missing, truncated, altered, or belongs to another run."""


class ConversionError(PacsError):
    """A weight or name has no mapping between Hugging Face and Megatron."""


class NonFiniteError(PacsError):
    """NaN or Inf in a loss or gradient. Raised before any weight changes."""


def named_error(name: str, message: str) -> PacsError:
    """The error that another process reported.

    Args:
        name: Name of its class. A class outside of this module becomes its nearest base class in
            this module, an unknown one PacsError.
        message: Text of the error.
    """
    kind = _error_class(name)
    public = next(base for base in kind.__mro__ if base.__module__ == __name__)
    assert issubclass(public, PacsError)
    return public(message)


def _error_class(name: str) -> type[PacsError]:
    """The loaded subclass of PacsError of that name, at any depth; else PacsError."""
    classes = [PacsError]
    for kind in classes:
        if kind.__name__ == name:
            return kind
        classes += kind.__subclasses__()  # the loop goes on over the classes that this adds
    return PacsError
