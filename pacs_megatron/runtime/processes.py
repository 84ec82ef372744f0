"""Ends child processes with their parent, and runs untrusted code in a child with limits."""

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
AGENT_PID = "PACS_AGENT_PID"
"""Environment variable of ranks under torchrun: its pid."""
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Slurm sends these to every process of a job step; Ctrl-C reaches the whole foreground group."""


def die_with_parent(number: signal.Signals = signal.SIGKILL, parent_pid: int | None = None) -> None:
    """Linux: the kernel sends `number` to this process when its parent ends; exits if `parent_pid`
    has ended before.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if parent_pid is not None and os.getppid() != parent_pid:
        sys.exit(1)


def ignore_job_signals() -> None:
    """Ignores the job's signals in a helper process, whose owner ends it."""
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def run_limited(work: Callable[[], Any], *, seconds: float, memory_bytes: int) -> Any:
    """The JSON value of `work()`, computed in a fork that the kernel ends after `seconds` of CPU
    time. Raises TimeoutError, or RuntimeError with type and message of an exception in `work`.
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
        fields = (
            Path("/proc/self/statm").read_text().split() if sys.platform == "linux" else ["0"] * 6
        )
        limit_memory(int(fields[5]) * os.sysconf("SC_PAGE_SIZE") + memory_bytes)
        try:
            report = ("", work())
        except MemoryError:
            report = (f"more than {memory_bytes >> 20} MiB of memory", None)
        except BaseException as error:
            report = (f"{type(error).__name__}: {error}", None)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(report).encode())
    finally:
        os._exit(0)


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
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def start_ticks(pid: int) -> int | None:
    """Linux: start time of a live process in clock ticks since boot; with the pid it identifies the
    process.
    """
    fields = stat_fields(pid)
    return None if fields is None else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP (or a debugger) has stopped the process."""
    return (stat_fields(pid) or "-")[0] in "Tt"
