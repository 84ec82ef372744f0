"""Named errors: a user's mistake ends in one of these, printed as one line, with a non-zero exit code.

A message finishes the reader's job: what, where, got, expected, fix.
"""

from collections.abc import Iterator
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every `pacs-megatron` command; batch scripts branch on them."""

    OK = 0
    FAILED = 1
    MISCONFIGURED = 2
    HANG = 70
    PREEMPTED = 75
    """State saved after a signal; run the same command again (EX_TEMPFAIL of sysexits.h)."""


class PacsError(Exception):
    """Base of every error that a user can cause or fix."""

    exit_code: ExitCode = ExitCode.FAILED


class ConfigError(PacsError):
    """The configuration is wrong; nothing has been started or written."""

    exit_code = ExitCode.MISCONFIGURED


class DataError(PacsError):
    """A data file, data set, tokenizer or chat template is missing or malformed."""

    exit_code = ExitCode.MISCONFIGURED


class RewardError(PacsError):
    """A verifier could not judge one answer; the sample is dropped and counted, never scored 0."""


class RolloutError(PacsError):
    """The rollout engine or the driver failed, or answered something that cannot be trusted."""


class SyncError(PacsError):
    """Weights did not reach the rollout engine whole; it must not sample until they have."""


class CheckpointError(PacsError):
    """A checkpoint is missing, truncated, altered or does not fit this run."""


class ConversionError(PacsError):
    """A weight or a name does not map between Hugging Face and Megatron."""


class NonFiniteError(PacsError):
    """NaN or Inf in a loss or gradient; raised before any weight changes."""


def named_error(name: str, message: str) -> PacsError:
    """The PacsError of that class name, as received from another process.

    A class that another module derives becomes its base in this module, which every process knows.
    """
    found = next((kind for kind in _kinds(PacsError) if kind.__name__ == name), PacsError)
    public: type[PacsError] = next(kind for kind in found.__mro__ if kind.__module__ == __name__)
    return public(message)


def _kinds(kind: type[PacsError]) -> Iterator[type[PacsError]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)
