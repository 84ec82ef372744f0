"""Shared by all command lines: one line for each error, and a report for an unexpected one."""

import argparse
import errno
import os
import platform
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pacs_megatron import __version__
from pacs_megatron.errors import ConfigError, ExitCode, PacsError, one_line
from pacs_megatron.runtime.environment import PACKAGES, installed

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SECRET = re.compile(r"(?i)(key|token|secret|password|passwd|credential)")


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose usage errors are one line, and whose help reports a full disk."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file, flush=True)


def integer_from(lowest: int) -> Callable[[str], int]:
    """The type of an argument: an integer of at least `lowest` and at most 12 digits."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < lowest:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r}, expected an integer of at least {lowest}"
            )
        return int(text)

    return read


def path_from(text: str) -> Path:
    """The type of an argument: a path."""
    if not text:
        raise argparse.ArgumentTypeError("'', expected a path")
    return Path(text)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises ConfigError for NUL and bytes that are not UTF-8, and without standard output, working
    directory or assertions.
    """
    if sys.stdout is None:
        raise ConfigError("standard output is closed; redirect it to a file or to /dev/null")
    if sys.flags.optimize:
        raise ConfigError(
            "PYTHONOPTIMIZE and -O remove checks of Megatron-Core and docstrings of transformers; "
            "unset"
        )
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory was removed; change to another one") from None
    for word in arguments:
        if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(
                f"argument {word[:60]!r} contains NUL or is not UTF-8; correct it, or LC_ALL "
                "(C.UTF-8)"
            )


def run_command(command: Callable[[], int]) -> int:
    """Runs `command`, which imports torch itself, and returns its exit code.

    Every error becomes one line on stderr.
    """
    # Idle OpenMP threads spin by default, which slows a busy host (docs/measurements/laptop.md);
    # torch reads this as it loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    while (
        descriptor := os.open(os.devnull, os.O_RDWR)
    ) <= 2:  # a file that is opened next would receive output
        os.set_inheritable(descriptor, True)  # so have the processes that this one starts
    os.close(descriptor)
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    try:
        return int(command())
    except KeyboardInterrupt:
        _print_line("interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `pacs-megatron config show ... | head`
        _discard(1)
        return 128 + signal.SIGPIPE
    except Exception as error:
        if isinstance(error, OSError):
            _discard(1)
        return report_error(error)


def report_error(error: Exception) -> int:
    """Prints `error` as one line, with a crash report unless a path or the disk is the cause;
    returns the exit code.
    """
    kind = type(error).__name__
    text = _message(error)[:300]
    if isinstance(error, PacsError):
        _print_line(f"{kind}: {error}")
        return int(error.exit_code)
    # Libraries read variables while they load, such as HF_HUB_DOWNLOAD_TIMEOUT.
    modules = [
        frame.filename
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.name == "<module>"
    ]
    is_memory = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    if (
        is_memory
        or isinstance(error, ImportError)
        or (modules and "pacs_megatron" not in modules[-1])
    ):
        fix = "check the installation (`make install`), the environment's variables and `ulimit -v`"
        _print_line(f"EnvironmentError: {kind}: {text}; {fix}")
        return int(ExitCode.FAILED)
    is_temporary = isinstance(error, OSError) and "temporary directory" in str(
        error.strerror
    )  # it lists the places
    if isinstance(error, OSError) and (
        error.filename is not None or error.errno in _FULL or is_temporary
    ):
        place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        fix = "free some space" if error.errno in _FULL else "correct the path or its permissions"
        _print_line(f"{kind}: {place}{error.strerror}; {fix}")
    else:
        _print_line(f"InternalError: {kind}: {text}; {write_report(error)}")
    return int(ExitCode.FAILED)


def write_report(error: BaseException) -> str:
    """Writes a crash report to the folder of temporary files; returns a text with its path for the
    message.
    """
    lines = [
        f"pacs-megatron {__version__}, Python {platform.python_version()}, {platform.platform()}",
        ", ".join(f"{name} {installed(name) or 'not installed'}" for name in PACKAGES),
        f"time: {time.strftime('%Y-%m-%dT%H:%M:%S%z')}",
        f"working directory: {os.environ.get('PWD')}",
        "arguments:",
        *(f"  {_without_secret(word)}" for word in sys.argv[1:]),
        "",
        *traceback.format_exception(error),
    ]
    try:
        handle, path = tempfile.mkstemp(prefix="pacs-megatron-crash-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join(lines))
    except OSError as failure:
        return f"no report was written ({failure.strerror})"
    return f"a bug: please report it with {path} (traceback, versions, arguments)"


def _print_line(text: str) -> None:
    """Prints to standard error; a full disk or a closed pipe does not change the exit code."""
    try:
        sys.stderr.write(one_line(text) + "\n")
        sys.stderr.flush()
    except OSError:
        _discard(2)


def _discard(descriptor: int) -> None:
    """Discards what a stream still holds: Python would report the error again when it flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"


def _without_secret(word: str) -> str:
    key, equals, _ = word.partition("=")
    return f"{key}=..." if equals and _SECRET.search(key) else word
