"""Worker processes that judge responses under a time limit.

Concurrency: one thread per worker takes submitted responses from a queue, sends them over a socket,
waits for the verdicts and calls each `done`. After the time limit or the death of the worker, the
thread kills the worker with all its child processes and starts a new one.
"""

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import psutil

from pacs_megatron.config.reward_options import AnyReward
from pacs_megatron.contracts import Prompt
from pacs_megatron.errors import ConfigError, DataError, RewardError
from pacs_megatron.rewards.worker import encode_inputs
from pacs_megatron.runtime.closing import Closing
from pacs_megatron.runtime.json_reader import as_object, parse_json
from pacs_megatron.runtime.waiting import report_wait

logger = logging.getLogger(__name__)
T = TypeVar("T")

_START_LIMIT_S = 120.0
"""Timeout of a worker's imports; a user's module may be large and the host busy."""
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
_MARK = "PACS_REWARD_WORKER"
"""Environment variable that identifies a worker's processes: a daemon leaves the worker's session
and process tree.
"""


class Verdict(NamedTuple):
    """Exactly one of `reward` and `failure` is None.

    `details`: the verifier's record, see `Judgement`.
    """

    key: str
    reward: float | None
    failure: str | None
    details: dict[str, Any] | None = None


class _Pending(NamedTuple):
    """A submitted response without a verdict."""

    key: str
    prompt: Prompt
    response: str
    done: Callable[[Verdict | RewardError], None]


class RewardPool(Closing):
    """`options.workers` processes that judge submitted responses.

    A context manager; it must be closed.
    """

    def __init__(self, options: AnyReward) -> None:
        """Starts the workers and waits until all are ready (about a second).

        Raises ConfigError if the reward cannot be built, RewardError if a worker does not start.
        """
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        """None: the pool has ended"""
        self._lock = threading.Lock()
        self._error: RewardError | None = None
        """why the pool has ended"""
        self._options = options
        self._workers = [_Worker(options) for _ in range(options.workers)]
        ready: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._serve, args=(worker, ready), name=f"reward-{number}", daemon=True
            )
            for number, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()

        with report_wait(f"for {options.workers} reward workers to import the reward function"):
            for _ in self._workers:
                error = ready.get()
                if error is not None:
                    self.close()
                    raise error

    def submit(
        self, key: str, prompt: Prompt, response: str, done: Callable[[Verdict | RewardError], None]
    ) -> None:
        """Queues one response, from any thread.

        A thread of the pool calls `done` with the verdict of `key` (the sample id), or with the
        RewardError that ended the pool. Raises RewardError if the pool has ended.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            self._queue.put(_Pending(key, prompt, response, done))

    def close(self) -> None:
        """Kills every worker with its child processes. Returns after every `done` was called."""
        self._end(RewardError("reward pool: it is closed"))
        for thread in self._threads:
            thread.join()

    def _end(self, error: Exception) -> None:
        """Ends the pool with `error` for every response without a verdict."""
        with self._lock:
            if self._error is None:
                self._error = error if isinstance(error, RewardError) else RewardError(str(error))
        self._queue.put(None)
        for worker in self._workers:
            worker.end()

    def _serve(self, worker: "_Worker", ready: "queue.SimpleQueue[Exception | None]") -> None:
        """The body of a worker's thread."""
        try:
            worker.start()
            ready.put(None)
        except Exception as error:  # noqa: BLE001  passed to the caller, which would wait otherwise
            self._end(error)
            ready.put(error)

        while pending := self._take():
            for item, verdict in zip(pending, self._judge(worker, pending), strict=True):
                if isinstance(verdict, Verdict) and verdict.failure is not None:
                    logger.warning(
                        "reward failed: prompt %s, sample %s: %s; response starts %r",
                        item.prompt.id,
                        item.key,
                        verdict.failure,
                        item.response[:200],
                    )
                item.done(verdict)
        worker.kill()

    def _take(self) -> list[_Pending]:
        """One response, and further queued ones up to the reward's batch size; empty if the pool
        has ended.
        """
        pending: list[_Pending] = []
        with contextlib.suppress(queue.Empty):
            while len(pending) < self._options.num_per_call:
                item = self._queue.get(block=not pending)
                if item is None:
                    self._queue.put(None)  # for the other threads
                    break
                pending.append(item)
        return pending

    def _judge(
        self, worker: "_Worker", pending: Sequence[_Pending]
    ) -> Sequence[Verdict | RewardError]:
        """The verdicts, or the error that ended the pool for each response."""
        try:
            if self._error is None:
                with self._report_wait():
                    verdicts = worker.judge(pending)
                # Otherwise `end` killed this worker, so the verifier did not fail.
                if self._error is None:
                    return verdicts
        except Exception as error:  # noqa: BLE001  passed to the callers
            self._end(error)
        assert self._error is not None
        return [self._error] * len(pending)

    def _report_wait(self) -> contextlib.AbstractContextManager[None]:
        waits_for = self._options.waits_for
        return report_wait(waits_for) if waits_for else contextlib.nullcontext()


def received(answers: "queue.SimpleQueue[T | RewardError]", count: int) -> list[T]:
    """The next `count` items of the queue. Raises a RewardError in the queue."""
    items: list[T] = []
    with report_wait(lambda: f"for {count - len(items)} verdicts of the reward"):
        for _ in range(count):
            item = answers.get()
            if isinstance(item, RewardError):
                raise item
            items.append(item)
    return items


class _Worker:
    """One process in its own session, and the socket to it.

    One thread owns it; other threads may call `end`.
    """

    def __init__(self, options: AnyReward) -> None:
        self._options = options
        self._mark = uuid.uuid4().hex
        self._output_left = _OUTPUT_BYTES
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._has_ended = False

    def start(self) -> None:
        """Starts the process and waits for its `ready`. Raises ConfigError or RewardError."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._has_ended:
                ours.close()
                raise RewardError("reward pool: it is closed")
            self._socket = ours
            self._process = self._launch(theirs.fileno())
        self._copier = threading.Thread(
            target=self._copy_output, args=(self._process.stdout,), daemon=True
        )
        self._copier.start()

        setup = {
            "options": self._options.model_dump_json(),
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "memory_limit_bytes": int(self._options.memory_limit_gib * 2**30),
        }
        reply = self._exchange(json.dumps(setup).encode() + b"\n", _START_LIMIT_S)
        if "error" in reply:
            raise ConfigError(reply["error"])
        if "failure" in reply:
            raise RewardError(
                f"reward worker did not start: {reply['failure']}; its stderr has the reason"
            )

    def judge(self, pending: Sequence[_Pending]) -> list[Verdict]:
        """The verdicts of one call. Raises ConfigError or RewardError if a new process does not
        start.
        """
        if self._process is None:  # killed in the call before
            self.start()
        self._output_left = _OUTPUT_BYTES
        line = encode_inputs([(item.prompt, item.response) for item in pending])
        reply = self._exchange(line, self._options.call_limit_s)
        # The kernel or a user killed it, rarely the response: a new process retries once.
        if reply.get("killed"):
            self.start()
            reply = self._exchange(line, self._options.call_limit_s)

        results = reply["verdicts"] if "verdicts" in reply else self._without_reply(reply, pending)
        return [
            Verdict(item.key, result.get("reward"), result.get("failure"), result.get("details"))
            for item, result in zip(pending, results, strict=True)
        ]

    def _without_reply(
        self, reply: dict[str, Any], pending: Sequence[_Pending]
    ) -> list[dict[str, Any]]:
        """The results of a call that failed, e.g. by the time limit: no verdict.

        With `math` a response is wrong if only it, not the gold answer, makes sympy hang.
        """
        if self._options.name != "math":
            return [reply] * len(pending)
        golds = [(item.prompt, f"\\boxed{{{item.prompt.answer}}}") for item in pending]
        self.start()
        judged = self._exchange(encode_inputs(golds), self._options.call_limit_s)
        verified = [result.get("reward") == 1.0 for result in judged.get("verdicts", [])]
        if len(verified) != len(pending) or not all(verified):
            return [reply] * len(pending)
        return [{"reward": 0.0, "details": {"answer": reply["failure"]}}] * len(pending)

    def end(self) -> None:
        """Kills the process; a later `start` raises RewardError."""
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

    def _launch(self, descriptor: int) -> "subprocess.Popen[bytes]":
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
                "from pacs_megatron.rewards.worker import main; main()",
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
                _MARK: self._mark,
            },
            start_new_session=True,
        )

    def _copy_output(self, source: IO[bytes]) -> None:
        """Copies the process's output to stderr, up to a limit per response, so that it cannot fill
        the disk.
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

    def _exchange(self, line: bytes, limit_s: float) -> dict[str, Any]:
        """Sends a line and returns the reply, or `failure` with the reason why there is none."""
        try:
            reply = self._reply_to(line, limit_s)
        except (TimeoutError, MemoryError) as error:
            self.kill()
            return {"failure": f"{error}; the worker was killed"}
        except OSError:
            reply = b""
        if not reply.endswith(b"\n"):
            code = self.kill()
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            return {"failure": f"the worker died ({how})", "killed": code == -signal.SIGKILL}
        try:
            return as_object(parse_json(reply, "verdict", any_text=True), "verdict")
        except DataError as error:
            self.kill()
            return {
                "failure": f"the worker sent no verdict ({error}); the reward function changes "
                "its process"
            }

    def _reply_to(self, line: bytes, limit_s: float) -> bytes:
        """One line; an incomplete one if the process has ended.

        Raises TimeoutError or MemoryError above the limits, and OSError.
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
                raise TimeoutError(f"no verdict within {limit_s:g} s")
            if time.monotonic() > next_measurement:
                next_measurement = time.monotonic() + _MEMORY_INTERVAL_S
                self._check_memory(self._process.pid)

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

    def _check_memory(self, pid: int) -> None:
        """Raises MemoryError above the limit: the worker's rlimit excludes child processes."""
        limit_gib = self._options.memory_limit_gib
        if _memory_bytes(pid, self._mark) > limit_gib * 2**30:
            raise MemoryError(
                f"its processes use more than reward.memory_limit_gib={limit_gib:g} together"
            )


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
