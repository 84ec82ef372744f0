"""A worker: one process that answers JSON lines under limits of time and memory.

It runs code that is not trusted to end: it may hang, fork, leave its session, print without end or
close its files. So it is killed with all its child processes, which a mark in their environment
identifies.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

import psutil

from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.processes import die_with_parent, ignore_job_signals, limit_memory

_POLL_S = 0.1
"""Interval of the checks that a worker is alive, because a grandchild may keep the socket of a dead
worker open.
"""
_KILL_S = 10.0
_OUTPUT_S = 1.0
"""Timeout for the last output of a killed process."""
_MEMORY_INTERVAL_S = 1.0
"""Seconds between measurements of a worker's memory."""
_OUTPUT_BYTES = 64 << 10
# One thread each: the workers are the parallelism.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
WORKER_MARK = "PACS_WORKER"
"""Environment variable that identifies a worker's processes: a daemon leaves the worker's session
and process tree.
"""


class WorkerProcess:
    """One process in its own session, and the socket to it.

    One thread owns it; other threads may call `end`.
    """

    def __init__(self, module: str, memory_limit_gib: float, memory_key: str) -> None:
        """Starts nothing.

        Args:
            module: its `main` calls `serve`.
            memory_limit_gib: of the worker and its child processes together.
            memory_key: of the configuration, for messages.
        """
        self._module = module
        self._memory_limit_gib = memory_limit_gib
        self._memory_key = memory_key
        self._mark = uuid.uuid4().hex
        self._output_left = _OUTPUT_BYTES
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._has_ended = False

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def launch(self) -> bool:
        """Starts the process. Returns False after `end`."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._has_ended:
                ours.close()
                return False
            self._socket = ours
            self._process = self._open_process(theirs.fileno())
        self._copier = threading.Thread(
            target=self._copy_output, args=(self._process.stdout,), daemon=True
        )
        self._copier.start()
        return True

    def end(self) -> None:
        """Kills the process; a later `launch` starts none."""
        with self._lock:
            self._has_ended = True
            if self._process is not None:
                _kill_tree(self._process.pid, self._mark)

    def kill(self) -> int | None:
        """Kills and reaps the process; returns its exit code (negative: the signal), None without a
        process.
        """
        with self._lock:
            process = self._process
            self._process = None
            if process is None:
                return None
            assert self._socket is not None
            self._socket.close()
            _kill_tree(process.pid, self._mark)
            self._copier.join(_OUTPUT_S)  # a grandchild may keep the pipe open
            # The kernel may wait for a file system.
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_KILL_S)
            return None

    def allow_output(self) -> None:
        """Renews the limit of output that reaches the log."""
        self._output_left = _OUTPUT_BYTES

    def exchange(self, line: bytes, limit_s: float, what: str) -> bytes:
        """Sends a line and returns the reply, an incomplete line if the process has ended.

        Args:
            line: with its line end.
            limit_s: for the reply, seconds.
            what: the reply, for messages.

        Raises:
            TimeoutError: there is none within the limit.
            MemoryError: the processes together use more than their limit.
            OSError: the process has ended.
        """
        assert self._process is not None and self._socket is not None
        deadline = time.monotonic() + limit_s
        next_measurement = time.monotonic() + _MEMORY_INTERVAL_S
        self._socket.settimeout(limit_s)
        self._socket.sendall(line)
        reply = bytearray()
        while not reply.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no {what} within {limit_s:g} s")
            if time.monotonic() > next_measurement:
                next_measurement = time.monotonic() + _MEMORY_INTERVAL_S
                self.check_memory()

            self._socket.settimeout(min(left_s, _POLL_S))
            try:
                piece = self._socket.recv(1 << 16)
            except TimeoutError:
                if _is_running(self._process.pid):
                    continue
                break
            if not piece:
                break
            reply += piece
        return bytes(reply)

    def open_channel(self) -> socket.socket:
        """The socket to the process, without blocking: for an owner that serves many workers with a
        selector instead of `exchange`.
        """
        assert self._socket is not None
        self._socket.setblocking(False)
        return self._socket

    def is_running(self) -> bool:
        """Whether the process runs. A grandchild may keep the socket of a dead one open."""
        return self._process is not None and _is_running(self._process.pid)

    def check_memory(self) -> None:
        """Raises MemoryError above the limit: the worker's rlimit excludes child processes."""
        assert self._process is not None
        limit_gib = self._memory_limit_gib
        if _memory_bytes(self._process.pid, self._mark) > limit_gib * 2**30:
            raise MemoryError(
                f"its processes use more than {self._memory_key}={limit_gib:g} together"
            )

    def _open_process(self, descriptor: int) -> "subprocess.Popen[bytes]":
        """Starts the process with the other end of the socket."""
        path = [str(Path(__file__).resolve().parents[2])]
        if "PYTHONPATH" in os.environ:
            path.append(os.environ["PYTHONPATH"])
        return subprocess.Popen(
            [
                sys.executable,
                # The working directory must not hide installed modules before sys.path is set.
                "-P",
                "-c",
                f"from {self._module} import main; main()",
                str(os.getpid()),
                str(descriptor),
            ],
            pass_fds=(descriptor,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                **_ENVIRONMENT,
                WORKER_MARK: self._mark,
            },
            start_new_session=True,
        )

    def _copy_output(self, source: IO[bytes]) -> None:
        """Copies the process's output to stderr, up to a limit per call, so that it cannot fill the
        disk.
        """
        with source:
            while data := source.read(1 << 16):
                allowed = self._output_left
                self._output_left -= len(data)
                if allowed <= 0:
                    continue
                note = b""
                if len(data) > allowed:
                    note = b"\n[the rest of this response's output is left out]\n"
                with contextlib.suppress(OSError):  # a full disk
                    os.write(2, data[:allowed] + note)


class Connection:
    """A worker's end of the socket. The worker ends at once when the other end is closed."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._lines = self._socket.makefile("r", encoding="utf-8")
        self._replies = self._socket.makefile("w", encoding="utf-8")

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one JSON line, after the worker's own output."""
        # The user's code may have closed or replaced it.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        try:
            self._replies.write(json.dumps(message) + "\n")
            self._replies.flush()
        except OSError:
            os._exit(1)

    def receive(self) -> str:
        """The next line."""
        line = ""
        with contextlib.suppress(ConnectionResetError):
            line = self._lines.readline()
        if not line:
            os._exit(1)
        return line

    def __iter__(self) -> Iterator[str]:
        """The lines until the other end closes the socket."""
        return iter(self._lines)


Handler: TypeAlias = Callable[[str, Connection], Mapping[str, Any]]
"""The reply to a line; may exchange other lines before it"""


def serve(build: Callable[[Mapping[str, Any]], Handler]) -> None:
    """The `main` of a worker's module: receives the setup, sends `{"ready": true}` or `{"error"}`,
    then the reply to each line.

    The setup has `sys_path`, `memory_limit_bytes` (of this process) and the worker's own values.

    Args:
        build: Handler of this setup. May raise ConfigError, which is the `error`.
    """
    parent_pid, descriptor = map(int, sys.argv[1:])
    die_with_parent(parent_pid=parent_pid)
    ignore_job_signals()
    connection = Connection(descriptor)

    setup = json.loads(connection.receive())
    sys.path[:] = setup["sys_path"]
    limit_memory(setup["memory_limit_bytes"])
    try:
        handle = build(setup)
    except ConfigError as error:
        connection.send({"error": str(error)})
        return
    connection.send({"ready": True})

    # The other end may close before it has read all data.
    with contextlib.suppress(ConnectionResetError):
        for line in connection:
            connection.send(handle(line, connection))


def _is_running(pid: int) -> bool:
    """Whether a child runs.

    Does not reap an ended child, so that its process group keeps its number.
    """
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _kill_tree(pid: int, mark: str) -> None:
    """Kills the session of a worker and its other processes."""
    before = set(_tree(pid, mark))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    # Those that started meanwhile, too.
    for process in before.union(_tree(pid, mark)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _tree(pid: int, mark: str) -> Iterator[psutil.Process]:
    """The worker, its descendants, and daemons with the worker's mark in their environment."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from psutil.Process(pid).children(recursive=True)
    for entry in Path("/proc").glob("[0-9]*"):
        # A process may have ended, or belong to another user.
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if mark.encode() in (entry / "environ").read_bytes():
                yield psutil.Process(int(entry.name))


def _memory_bytes(pid: int, mark: str) -> int:
    """Total memory of a worker's processes, bytes; a shared page counts once."""
    total = 0
    for process in set(_tree(pid, mark)):
        with contextlib.suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss
    return total
