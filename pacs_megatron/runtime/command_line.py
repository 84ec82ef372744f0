"""Shared by all command lines: one line for each error, and a report for an unexpected one."""

import argparse
import errno
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from pacs_megatron import __version__
from pacs_megatron.errors import (
    ConfigError,
    ExitCode,
    PacsError,
    did_you_mean,
    one_line,
    shown,
)
from pacs_megatron.runtime.environment import PACKAGES, check_secret, installed
from pacs_megatron.runtime.waiting import first_word_in_time

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SECRET = re.compile(r"(?i)(key|token|secret|password|passwd|credential)")


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose usage errors are one line, and whose help reports a full disk."""

    other_words: Mapping[str, str] = MappingProxyType({})
    """Words that are no choice -> what to write in their place"""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def error_of_unknown(self, words: Sequence[str], hint: str) -> NoReturn:
        """Raises ConfigError for arguments that no option takes, with the nearest option.

        Args:
            words: The arguments.
            hint: The end of the message.
        """
        names: list[str] = []
        for action in self._actions:
            names += action.option_strings
        near = ""
        for word in words:
            if word.startswith("--"):
                near = near or did_you_mean(word.partition("=")[0], names, cutoff=0.7)
        hint = near + hint
        self.error(f"unrecognized arguments: {' '.join(words)}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ArgumentError for a value that is no choice, with the nearest one."""
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        hint = did_you_mean(str(value), names)
        if value in self.other_words:
            hint = f"; did you mean {self.other_words[value]}?"
        raise argparse.ArgumentError(
            action, f"invalid choice: {shown(value)} (choose from {', '.join(names)}){hint}"
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse ignores an OSError here; the flush makes a full disk an error of the command.
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
    return Path(os.path.expanduser(text))  # a shell leaves the `~` of --out=~/x


def check_arguments(arguments: Sequence[str]) -> None:
    """Checks the arguments and the process, before any other work.

    Raises:
        ConfigError: An argument contains NUL or bytes that are not UTF-8, or the process has no
            standard output, no working directory or no assertions.
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

    _check_variables()
    for argument in arguments:
        # Python decodes each byte that is not UTF-8 to a lone surrogate.
        if "\0" in argument or any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise ConfigError(
                f"argument {argument[:60]!r} contains NUL or is not UTF-8; correct it, or LC_ALL "
                "(C.UTF-8)"
            )


def _check_variables() -> None:
    """Raises ConfigError for variables whose values end libraries without a clear message."""
    level = os.environ.get("LOGLEVEL", "")  # torch's launcher sets its loggers to it
    if level and level not in logging.getLevelNamesMapping() and not level.isdecimal():
        raise ConfigError(
            f"LOGLEVEL={shown(level)}: torch reads this variable; unset it, or set it to INFO or "
            "WARNING"
        )
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        check_secret(name)


def program() -> str:
    """The words that start this program, as a command that a message prints: the name if it is on
    PATH, else the path of its file.
    """
    name = "pacs-megatron"
    beside = Path(sys.executable).with_name(name)
    on_path = shutil.which(name)
    if on_path is not None and os.path.realpath(on_path) == os.path.realpath(beside):
        return name
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m pacs_megatron"
    relative = os.path.relpath(beside)
    return shlex.quote(str(beside) if relative.startswith("..") else relative)


def run_command(command: Callable[[], int]) -> int:
    """Runs `command`, which imports torch itself, and returns its exit code.

    Every error becomes one line on stderr.
    """
    # Idle OpenMP threads spin by default, which slows a busy host (docs/measurements/laptop.md);
    # torch reads this as it loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _open_missing_streams()

    try:
        with first_word_in_time():
            return int(command())
    except KeyboardInterrupt:
        _print_line("interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `pacs-megatron config show ... | head`
        _discard(1)
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001  (everything else becomes one line)
        if isinstance(error, OSError):
            _discard(1)
        return report_error(error)


def _open_missing_streams() -> None:
    """Opens /dev/null for each of the descriptors 0, 1 and 2 that is closed.

    Otherwise the next file that is opened would get that number and receive output.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)  # for the processes that this one starts
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)

    sys.stderr = sys.stderr or os.fdopen(2, "w")


def report_error(error: Exception) -> int:
    """Prints `error` as one line and returns the exit code.

    Writes a crash report unless the user can fix the cause: an error of this project, the
    installation, a path or the disk.
    """
    kind = type(error).__name__
    text = _message(error)[:300]

    if isinstance(error, PacsError):
        _print_line(f"{kind}: {error}")
        return int(error.exit_code)

    if _is_of_installation(error):
        fix = "check the installation (`make install`), the environment's variables and `ulimit -v`"
        _print_line(f"EnvironmentError: {kind}: {text}; {fix}")
    elif isinstance(error, OSError) and _is_of_disk(error):
        place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        is_full = error.errno in _DISK_FULL
        fix = "free some space" if is_full else "correct the path or its permissions"
        _print_line(f"{kind}: {place}{error.strerror}; {fix}")
    else:
        _print_line(f"InternalError: {kind}: {text}; {write_report(error)}")
    return int(ExitCode.FAILED)


def _is_of_installation(error: Exception) -> bool:
    """Whether memory or a library is the cause."""
    if isinstance(error, MemoryError | ImportError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True

    # Libraries read variables while they load, such as HF_HUB_DOWNLOAD_TIMEOUT.
    frames = traceback.extract_tb(error.__traceback__)
    loading = [frame.filename for frame in frames if frame.name == "<module>"]
    return bool(loading) and "pacs_megatron" not in loading[-1]


def _is_of_disk(error: OSError) -> bool:
    # tempfile's error has no filename, it lists the folders that it tried.
    has_no_temporary_folder = "temporary directory" in str(error.strerror)
    return error.filename is not None or error.errno in _DISK_FULL or has_no_temporary_folder


def write_report(error: BaseException) -> str:
    """Writes a crash report to the folder of temporary files.

    Returns:
        A text for the message, with the path of the report.
    """
    versions = [f"{name} {installed(name) or 'not installed'}" for name in PACKAGES]
    arguments = [f"  {_without_secret(argument)}" for argument in sys.argv[1:]]
    lines = [
        f"pacs-megatron {__version__}, Python {platform.python_version()}, {platform.platform()}",
        ", ".join(versions),
        f"time: {time.strftime('%Y-%m-%dT%H:%M:%S%z')}",
        f"working directory: {os.environ.get('PWD')}",
        "arguments:",
        *arguments,
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
    except Exception:  # noqa: BLE001  (an exception of a plug-in)
        return "(its message cannot be shown)"


def _without_secret(argument: str) -> str:
    key, equals, _ = argument.partition("=")
    return f"{key}=..." if equals and _SECRET.search(key) else argument
