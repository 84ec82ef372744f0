"""Ends child processes with their parent, and runs untrusted code in a child with limits."""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
AGENT_PID = "PACS_AGENT_PID"
"""Environment variable of ranks under torchrun: its pid."""
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Slurm sends these to every process of a job step; Ctrl-C reaches the whole foreground group."""
_STATM_DATA = 5
_STAT_START_TIME = 19
"""Positions in /proc/<pid>/statm and in `stat_fields` (proc(5))"""


def die_with_parent(number: signal.Signals = signal.SIGKILL, parent_pid: int | None = None) -> None:
    """Linux: the kernel sends `number` to this process when its parent ends; exits if `parent_pid`
    has ended before.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    # Compared after prctl, which has no effect for a parent that has already ended.
    if parent_pid is not None and os.getppid() != parent_pid:
        sys.exit(1)


def ignore_job_signals() -> None:
    """Ignores the job's signals in a helper process, whose owner ends it."""
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def run_limited(work: Callable[[], Any], *, seconds: float, memory_bytes: int) -> Any:
    """The JSON value of `work()`, computed in a fork with limits.

    Args:
        work: Runs in the fork.
        seconds: CPU time, after which the kernel ends the fork.
        memory_bytes: Memory that the fork may use in addition to the memory of this process.

    Raises:
        TimeoutError: `work` needs more CPU time.
        RuntimeError: `work` raises, with the exception's type and message, or the fork crashes.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _report_and_exit(work, writer, seconds, memory_bytes)

    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)

    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGPROF:
            raise TimeoutError
        raise RuntimeError(f"ended by signal {os.WTERMSIG(status)}")
    error, value = json.loads(data) if data else ("no memory for the report", None)
    if error:
        raise RuntimeError(error)
    return value


def _report_and_exit(
    work: Callable[[], Any], writer: int, seconds: float, memory_bytes: int
) -> None:
    """Runs `work` in the fork.

    Calls nothing that may wait for a lock of the parent's other threads.
    """
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library of Rust prints its own report
        for number in (*JOB_SIGNALS, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        limit_memory(_data_bytes() + memory_bytes)

        report: tuple[str, Any]
        try:
            report = ("", work())
        except MemoryError:
            report = (f"more than {memory_bytes >> 20} MiB of memory", None)
        except BaseException as error:  # noqa: BLE001  (a panic of Rust is not an Exception)
            report = (f"{type(error).__name__}: {error}", None)

        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(report).encode())
    finally:
        os._exit(0)


def _data_bytes() -> int:
    """Linux: size of this process's data and stack, which RLIMIT_DATA limits; 0 elsewhere."""
    if sys.platform != "linux":
        return 0
    pages = Path("/proc/self/statm").read_text().split()[_STATM_DATA]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def limit_memory(limit_bytes: int) -> None:
    """Limits this process's memory: a larger allocation raises MemoryError instead of starting the
    OOM killer.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def stat_fields(pid: int) -> list[str] | None:
    """Linux: fields of /proc/<pid>/stat after the command's name, the state letter first; None
    after the process's end.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the command is in brackets and may contain spaces and brackets.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


def start_ticks(pid: int) -> int | None:
    """Linux: start time of a live process in clock ticks since boot; with the pid it identifies the
    process.
    """
    fields = stat_fields(pid)
    return None if fields is None else int(fields[_STAT_START_TIME])


def age_s() -> float:
    """Seconds since the start of this process; 0 where /proc does not have it."""
    ticks = start_ticks(os.getpid())
    if ticks is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP (or a debugger) has stopped the process."""
    fields = stat_fields(pid)
    return fields is not None and fields[0] in "Tt"
