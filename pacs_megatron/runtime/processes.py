"""Child processes that end with their parent."""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Slurm sends these to every process of a job step; Ctrl-C reaches the whole foreground group."""


def die_with_parent(number: signal.Signals = signal.SIGKILL, parent_pid: int | None = None) -> None:
    """Linux: the kernel sends `number` to this process when its parent ends.

    `parent_pid`: exits with code 1 if the parent ended before this call.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if parent_pid is not None and os.getppid() != parent_pid:
        sys.exit(1)


def ignore_job_signals() -> None:
    """For helper processes: their owner decides when they end."""
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def process_facts(pid: int) -> tuple[str, str] | None:
    """Linux: state letter (`T`: stopped) and start time in clock ticks of a process; None after its end."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (fields[0], fields[19])


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP (or a debugger) holds the process."""
    facts = process_facts(pid)
    return facts is not None and facts[0] in "Tt"
