"""Worker processes that judge responses under a time limit.

One thread per worker takes a job, sends it over a socket, waits for the verdict and calls the job's
`done`. After the time limit or the death of the worker, the thread kills the worker with all its
child processes and starts a new one.
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
from pacs_megatron.rewards.worker import encode_jobs
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
_MEMORY_INTERVAL_S = _OUTPUT_S = 1.0
"""Seconds between measurements of a worker's memory, and timeout for the last output of a killed
process.
"""
_OUTPUT_BYTES = 64 << 10
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",
}  # one thread each: the workers are the parallelism
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


class _Job(NamedTuple):
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
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        """None: the pool has ended"""
        self._lock = threading.Lock()
        self._error: RewardError | None = None
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
            self._jobs.put(_Job(key, prompt, response, done))

    def close(self) -> None:
        """Kills every worker with its child processes. Returns after every `done` was called."""
        self._end(RewardError("reward pool: it is closed"))
        for thread in self._threads:
            thread.join()

    def _end(self, error: Exception) -> None:
        with self._lock:
            if self._error is None:
                self._error = error if isinstance(error, RewardError) else RewardError(str(error))
        self._jobs.put(None)
        for worker in self._workers:
            worker.end()

    def _serve(self, worker: "_Worker", ready: "queue.SimpleQueue[Exception | None]") -> None:
        try:
            worker.start()
            ready.put(None)
        except Exception as error:  # passed to the caller, which would wait otherwise
            self._end(error)
            ready.put(error)
        while jobs := self._take():
            for job, answer in zip(jobs, self._judge(worker, jobs), strict=True):
                if isinstance(answer, Verdict) and answer.failure is not None:
                    text = "reward failed: prompt %s, sample %s: %s; response starts %r"
                    logger.warning(text, job.prompt.id, job.key, answer.failure, job.response[:200])
                job.done(answer)
        worker.kill()

    def _judge(self, worker: "_Worker", jobs: Sequence[_Job]) -> Sequence[Verdict | RewardError]:
        try:
            if self._error is None:
                with (
                    report_wait(self._options.waits_for)
                    if self._options.waits_for
                    else contextlib.nullcontext()
                ):
                    verdicts = worker.judge(jobs)
                if self._error is None:  # `end` killed this worker, so the verifier did not fail
                    return verdicts
        except Exception as error:  # passed to the callers
            self._end(error)
        assert self._error is not None
        return [self._error] * len(jobs)

    def _take(self) -> list[_Job]:
        """One job, and further queued jobs up to the reward's batch size; empty if the pool has
        ended.
        """
        jobs: list[_Job] = []
        with contextlib.suppress(queue.Empty):
            while len(jobs) < self._options.num_per_call:
                job = self._jobs.get(block=not jobs)
                if job is None:
                    self._jobs.put(None)  # for the other threads
                    break
                jobs.append(job)
        return jobs


def received(answers: "queue.SimpleQueue[T | RewardError]", count: int) -> list[T]:
    """The next `count` items of the queue. Raises a RewardError in the queue."""
    found: list[T] = []
    with report_wait(lambda: f"for {count - len(found)} verdicts of the reward"):
        for _ in range(count):
            answer = answers.get()
            if isinstance(answer, RewardError):
                raise answer
            found.append(answer)
    return found


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
            # -P: the working directory must not hide installed modules before sys.path is set.
            program = [
                sys.executable,
                "-P",
                "-c",
                "from pacs_megatron.rewards.worker import main; main()",
            ]
            inherited = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
            path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *inherited])
            self._process = subprocess.Popen(
                [*program, str(os.getpid()), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": path, **_ENVIRONMENT, _MARK: self._mark},
                start_new_session=True,
            )
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

    def _copy_output(self, source: IO[bytes]) -> None:
        """Copies the process's output to stderr, up to a limit per response, so that it cannot fill
        the disk.
        """
        with source:
            while data := source.read(1 << 16):
                allowed = self._output_left
                self._output_left -= len(data)
                if allowed > 0:
                    cut = (
                        b"\n[the rest of this response's output is left out]\n"
                        if len(data) > allowed
                        else b""
                    )
                    with contextlib.suppress(OSError):  # a full disk
                        os.write(2, data[:allowed] + cut)

    def judge(self, jobs: Sequence[_Job]) -> list[Verdict]:
        if self._process is None:  # killed in the call before
            self.start()
        self._output_left = _OUTPUT_BYTES
        line = encode_jobs([(job.prompt, job.response) for job in jobs])
        reply = self._exchange(line, self._options.call_limit_s)
        if reply.get(
            "killed"
        ):  # the kernel or a user killed it, rarely the response: a new process retries once
            self.start()
            reply = self._exchange(line, self._options.call_limit_s)
        verdicts = reply["verdicts"] if "verdicts" in reply else [reply] * len(jobs)
        return [
            Verdict(job.key, found.get("reward"), found.get("failure"), found.get("details"))
            for job, found in zip(jobs, verdicts, strict=True)
        ]

    def _exchange(self, line: bytes, limit_s: float) -> dict[str, Any]:
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
        """One line; an incomplete one if the process has ended. Raises TimeoutError, MemoryError."""
        assert self._process is not None and self._socket is not None
        deadline = time.monotonic() + limit_s
        check = time.monotonic() + _MEMORY_INTERVAL_S
        self._socket.settimeout(limit_s)
        self._socket.sendall(line)
        reply = bytearray()
        while not reply.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no verdict within {limit_s:g} s")
            if time.monotonic() > check:  # the worker's rlimit does not count child processes
                check = time.monotonic() + _MEMORY_INTERVAL_S
                limit_gib = self._options.memory_limit_gib
                if _memory_bytes(self._process.pid, self._mark) > limit_gib * 2**30:
                    raise MemoryError(
                        f"its processes use more than reward.memory_limit_gib={limit_gib:g} "
                        "together"
                    )
            self._socket.settimeout(min(left, _POLL_S))
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
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # the kernel waits for a file system
                return process.wait(_KILL_S)
            return None


def _is_running(pid: int) -> bool:
    """Whether a child runs.

    Does not reap an ended child, so that its process group keeps its number.
    """
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _kill_tree(pid: int, mark: str) -> None:
    """Kills the session of a worker and its other processes."""
    found = set(_tree(pid, mark))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in found.union(_tree(pid, mark)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _tree(pid: int, mark: str) -> Iterator[psutil.Process]:
    """The worker, its descendants, and daemons with the worker's mark in their environment."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from psutil.Process(pid).children(recursive=True)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(
            OSError, psutil.NoSuchProcess
        ):  # it has ended, or belongs to another user
            if mark.encode() in (entry / "environ").read_bytes():
                yield psutil.Process(int(entry.name))


def _memory_bytes(pid: int, mark: str) -> int:
    """Total memory of a worker's processes, bytes; a shared page counts once."""
    total = 0
    for process in set(_tree(pid, mark)):
        with contextlib.suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss
    return total
