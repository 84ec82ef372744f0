"""Runs one command to its end and measures it.

A command runs in a fork of the test process, which has the imports already, unless it needs
variables that only a new interpreter reads.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pacs_megatron.cli import main

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "pacs_megatron"]
LIMIT_S = 240.0
"""So that a hang ends."""
MEMORY_BYTES = 2 << 30
"""Data of each process of a command, beyond what it begins with."""
IMPORTS_BYTES = 1 << 29
"""Limit of the imports of a new process. A fork begins with the resident set of the tests."""
ONE_LINE = (
    *("compare", "diversity", "paper", "data", "convert", "config", "plan", "status", "logs"),
    *("cancel", "submit", "export"),
)
"""Verbs that print an error and nothing else."""
FORKED = (*ONE_LINE, "eval", "preflight", "certify", "doctor", "fetch", "train")
_READ_LATE = re.compile(r"(SLURM|NCCL|GLOO|MASTER|PACS)_\w+|PATH|TMPDIR|JUDGE")
"""Variables that a running interpreter reads when they are needed."""
_WAIT = re.compile(rb"waiting |in phase |rewards \d+/")
"""A wait that the program reports: its reports become rarer, which is no silence."""


@dataclass
class Outcome:
    """How one command ended."""

    code: int | None
    """None: it did not end."""
    text: str
    silence_s: float
    starved_s: float
    """time in which the process was runnable and a busy host did not run it"""
    cpu_s: float
    wall_s: float
    memory_bytes: int
    """largest resident set of a process, beyond what it began with"""


def run(command: Sequence[str | bytes], folder: Path, environ: dict[str, str]) -> Outcome:
    """Runs a command in `folder`, and kills it after LIMIT_S.

    Args:
        command: words of a verb; or `sh`, `-c` and a script, in which `$P` is the program.
        folder: working and temporary directory.
        environ: variables beside those of the tests.
    """
    begin = time.monotonic()
    reader, writer = os.pipe()
    pid, held = _start(command, folder, environ, writer)
    os.close(writer)
    timer = threading.Timer(LIMIT_S, lambda: os.killpg(pid, 9))
    timer.start()
    parts, silence_s = _read(reader, begin)
    os.close(reader)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    starved_s = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    _, status, usage = os.wait4(pid, 0)
    has_hung = not timer.is_alive()
    timer.cancel()
    return Outcome(
        code=None if has_hung else os.waitstatus_to_exitcode(status),
        text=b"".join(parts).decode(errors="replace"),
        silence_s=silence_s,
        starved_s=starved_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        wall_s=time.monotonic() - begin,
        memory_bytes=usage.ru_maxrss * 1024 - held,
    )


def _read(reader: int, begin: float) -> tuple[list[bytes], float]:
    """The output, and the longest time without a part of it."""
    last = begin
    silence_s = 0.0
    parts: list[bytes] = []
    while part := os.read(reader, 65536):
        now = time.monotonic()
        if not parts or not _WAIT.search(parts[-1]):
            silence_s = max(silence_s, now - last)
        last = now
        parts.append(part)
    return parts, max(silence_s, time.monotonic() - last)


def _start(
    command: Sequence[str | bytes], folder: Path, environ: dict[str, str], output: int
) -> tuple[int, int]:
    """The process of a command, and the bytes with which it begins."""
    words = [os.fsdecode(word) for word in command]
    needs_interpreter = (
        not words
        or words[0] not in FORKED
        or not all(_READ_LATE.fullmatch(name) for name in environ)
        or any("some/" in word for word in words)  # the hub's client reads its variables once
    )
    if not needs_interpreter:
        held = _held_bytes("VmRSS")
        return _fork(lambda: main(words), folder, environ, output), held
    inherited = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    process = subprocess.Popen(
        list(command) if words[:1] == ["sh"] else [*PROGRAM, *command],
        cwd=folder,
        env=inherited | {"P": " ".join(PROGRAM)} | environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_limit_memory,
    )
    process.returncode = 0  # `run` waits for it
    return process.pid, IMPORTS_BYTES


def _fork(work: Callable[[], Any], folder: Path, environ: dict[str, str], output: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code: Any = 70
    try:
        os.setsid()
        _limit_memory()
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)} | environ
        tempfile.tempdir = None
        logging.getLogger().handlers.clear()  # pytest's
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        try:
            code = work()
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(int(code or 0))


def _limit_memory() -> None:
    """MEMORY_BYTES more than this process has: a fork begins with what earlier tests left."""
    limit = _held_bytes("VmData") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _held_bytes(kind: str) -> int:
    """VmData or VmRSS of this process."""
    [kib] = re.findall(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) << 10
