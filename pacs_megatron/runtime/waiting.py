"""Reports long waits from a separate thread; the waiting thread may be inside a C++ call."""

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from pacs_megatron.runtime.processes import age_s

logger = logging.getLogger(__name__)
NOTICE_S = 4.0
"""Seconds after which the first line reports a wait"""
MAX_INTERVAL_S = 60.0
COMMAND_START = "PACS_COMMAND_START"
"""Environment variable of a command's ranks: when it started, on the clock `time.monotonic`, s"""
_START_S = 30.0
"""Seconds after the start of a command in which its first notice comes early"""
NOT_RUN = 127
"""Exit status of `try_program` for a program that did not run, as in a shell"""
_open = threading.local()
"""The thread's open blocks of `report_wait`, outermost first, as `stack`"""
_command: dict[str, float] = {}
"""`start`: when the command started, until its first notice"""


@contextlib.contextmanager
def first_word_in_time() -> Iterator[None]:
    """Inside the block, the first notice comes NOTICE_S after the start of the command: several
    short waits may come before the one that it reports.
    """
    _command["start"] = command_start()
    try:
        yield
    finally:
        _command.pop("start", None)


def command_start() -> float:
    """When this process, or the command that started it as a rank, has started.

    On the clock `time.monotonic`, which all processes of a host share, in seconds.
    """
    given = os.environ.get(COMMAND_START)
    return time.monotonic() - age_s() if given is None else float(given)


def _first_notice_s(start: float) -> float:
    """Seconds from the start of a wait to its first report."""
    command = _command.get("start")
    if command is None or start - command > _START_S:
        return NOTICE_S
    return max(NOTICE_S / 4, NOTICE_S - (start - command))


def next_notice_s(waited_s: float) -> float:
    """Seconds to the next report of a wait: every 5 s, after a minute every minute."""
    return 5.0 if waited_s < MAX_INTERVAL_S else MAX_INTERVAL_S


@contextlib.contextmanager
def hub_wait(name: str) -> Iterator[None]:
    """`report_wait` for `name` of the Hugging Face hub, in place of the hub client's line for every
    retry.
    """
    reason = f"for {name} from the Hugging Face hub (HF_HUB_OFFLINE=1: only the local cache)"
    with quiet("huggingface_hub", logging.ERROR), report_wait(reason):
        yield


@contextlib.contextmanager
def quiet(name: str, level: int) -> Iterator[None]:
    """Suppresses lines of this logger below `level`."""
    named = logging.getLogger(name)
    before = named.level
    named.setLevel(level)
    try:
        yield
    finally:
        named.setLevel(before)


@contextlib.contextmanager
def report_wait(reason: str | Callable[[], str]) -> Iterator[None]:
    """Logs that the block waits, after NOTICE_S and then at the intervals of `next_notice_s`.

    Only one of a thread's nested blocks logs: the innermost one, or an outer one while the
    innermost has been open for less than half of NOTICE_S, as in a series of short waits.

    Args:
        reason: The object of the line "waiting ...", or a function that returns it. Nothing is
            logged while it is empty.
    """
    start = time.monotonic()
    done = threading.Event()
    stack: list[tuple[threading.Event, float]] = _open.__dict__.setdefault("stack", [])
    stack.append((done, start))

    def report() -> None:
        interval = _first_notice_s(start)
        while not done.wait(interval):
            waited = time.monotonic() - start
            interval = next_notice_s(waited)
            text = reason if isinstance(reason, str) else reason()
            for innermost, since in stack[-1:]:  # empty if the block ends just now
                is_short = time.monotonic() - since < NOTICE_S / 2
                if text and (innermost is done or is_short):
                    _command.pop("start", None)
                    logger.warning("waiting %s: %.0f s", text, waited)

    thread = threading.Thread(target=report, name="report wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stack.pop()
        done.set()
        thread.join()


def run_program(
    command: Sequence[str], *, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program and returns its status and output; reports a long wait.

    Raises the errors of `subprocess.run` without `check`.
    """
    with report_wait(f"for the program `{' '.join(command[:3])}`"):
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )


def try_program(command: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Same as `run_program`, without exceptions.

    A program that does not start, or does not end in time, has the status NOT_RUN and the reason as
    standard error.
    """
    try:
        return run_program(command, timeout_s=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = " ".join(str(error).split())
        return subprocess.CompletedProcess(command, NOT_RUN, "", reason)
