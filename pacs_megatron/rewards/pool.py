"""Worker processes that judge answers under a time limit.

Concurrency: `submit` and `next_finished` may be called from any thread. One background thread runs an event loop with one
task a worker; a task takes a job, sends it over a pipe, waits for the verdict, and kills and replaces its process when
that takes longer than the limit or the process dies. The loop's end, good or bad, unblocks every waiting caller.
"""

import asyncio
import contextlib
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from pacs_megatron.contracts import Prompt
from pacs_megatron.errors import ConfigError, RewardError
from pacs_megatron.rewards.registry import AnyReward
from pacs_megatron.rewards.worker import encode_job

logger = logging.getLogger(__name__)

_START_LIMIT_S = 120.0
"""For importing the reward's modules; a user's may be heavy and the host busy."""
_LOGGED_CHARS = 200


class Verdict(NamedTuple):
    """Exactly one of `reward` and `failure` is None."""

    key: str
    reward: float | None
    failure: str | None


class _Job(NamedTuple):
    key: str
    prompt: Prompt
    response: str


class _Stopped(NamedTuple):
    """Last item of the results: the loop has ended."""


class RewardPool:
    """`options.workers` processes that judge what is submitted. A context manager; close it."""

    def __init__(self, options: AnyReward) -> None:
        """Starts the workers and waits until they are ready (about a second).

        Raises ConfigError when the reward cannot be built (its pattern or function), RewardError when a worker does
        not start.
        """
        self._options = options
        self._verdicts: queue.SimpleQueue[Verdict | _Stopped] = queue.SimpleQueue()
        self._num_pending = 0
        self._lock = threading.Lock()
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run_loop, name="reward-pool", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except (ConfigError, RewardError):
            self.close()
            raise

    @property
    def num_pending(self) -> int:
        """Answers submitted whose verdict has not been taken yet."""
        with self._lock:
            return self._num_pending

    def submit(self, key: str, prompt: Prompt, response: str) -> None:
        """Queues one answer and returns at once; `key` (the sample id) comes back with the verdict.

        Raises RewardError when the pool has ended.
        """
        with self._lock:
            self._num_pending += 1
        try:
            self._loop.call_soon_threadsafe(self._jobs.put_nowait, _Job(key, prompt, response))
        except RuntimeError:  # the loop is closed
            self._thread.join()
            self._raise_end()

    def next_finished(self, timeout_s: float | None = None) -> Verdict | None:
        """The next verdict, in order of finishing; None when none came within `timeout_s` (None: wait, 0: look).

        Raises RewardError when nothing is pending and `timeout_s` is None, or when the pool has ended.
        """
        if timeout_s is None and self.num_pending == 0:
            raise RewardError("reward pool: waiting for a verdict, but no answer was submitted")
        try:
            verdict = self._verdicts.get(block=timeout_s != 0, timeout=timeout_s or None)
        except queue.Empty:
            return None
        if isinstance(verdict, _Stopped):
            self._verdicts.put(verdict)  # for every other caller
            self._raise_end()
        with self._lock:
            self._num_pending -= 1
        return verdict

    def results(self) -> Iterator[Verdict]:
        """Verdicts as they finish, until nothing is pending."""
        while self.num_pending > 0:
            verdict = self.next_finished()
            if verdict is not None:
                yield verdict

    def close(self) -> None:
        """Kills and reaps every worker; what is pending is lost. Safe to call twice."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _raise_end(self) -> NoReturn:
        error = self._ended.exception()
        if error is not None:
            raise error
        raise RewardError("reward pool: it is closed")

    # ------------------------------------------------------------------------------------- in the background thread
    def _run_loop(self) -> None:
        task = self._loop.create_task(self._serve())
        self._loop.run_until_complete(asyncio.wait([task]))
        self._loop.close()
        # An error is carried to the callers, who would wait for ever otherwise.
        error = task.exception()
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
            if not self._started.done():
                self._started.set_exception(error)
        self._verdicts.put(_Stopped())

    async def _serve(self) -> None:
        workers = [_Worker(self._options) for _ in range(self._options.workers)]
        stop = asyncio.ensure_future(self._stop.wait())
        tasks: list[asyncio.Future[Any]] = []
        try:
            tasks = [asyncio.ensure_future(worker.start()) for worker in workers]
            await asyncio.gather(*tasks)
            self._started.set_result(None)
            tasks = [asyncio.ensure_future(self._work(worker)) for worker in workers]
            done, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in [stop, *tasks]:
                task.cancel()
            await asyncio.gather(stop, *tasks, return_exceptions=True)
            await asyncio.gather(*(worker.kill() for worker in workers))

    async def _work(self, worker: "_Worker") -> None:
        while True:
            job = await self._jobs.get()
            answer = await worker.judge(job)
            verdict = Verdict(job.key, answer.get("reward"), answer.get("failure"))
            if verdict.failure is not None:
                logger.warning(
                    "reward failed: prompt %s, sample %s: %s; response starts %r",
                    job.prompt.id,
                    job.key,
                    verdict.failure,
                    job.response[:_LOGGED_CHARS],
                )
            self._verdicts.put(verdict)
            if not worker.alive:
                await worker.start()


class _Worker:
    """One process and its pipes; owned by one task."""

    def __init__(self, options: AnyReward) -> None:
        self._options = options
        self._process: asyncio.subprocess.Process | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None

    async def start(self) -> None:
        """Starts the process and waits for its `ready`. Raises ConfigError or RewardError."""
        # -P: the working directory must not shadow installed modules before sys.path is handed over.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-c", "from pacs_megatron.rewards.worker import main; main()", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_worker_env(),
        )
        setup = {
            "options": self._options.model_dump_json(),
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "memory_limit_bytes": int(self._options.memory_limit_gib * 2**30),
        }
        answer = await self._exchange(json.dumps(setup).encode() + b"\n", _START_LIMIT_S)
        if "error" in answer:
            raise ConfigError(answer["error"])
        if "failure" in answer:
            raise RewardError(f"reward worker did not start: {answer['failure']}; its stderr says why")

    async def judge(self, job: _Job) -> dict[str, Any]:
        """`{"reward"}` or `{"failure"}`; after a time-out or a death the worker is no longer `alive`."""
        return await self._exchange(encode_job(job.prompt, job.response), self._options.timeout_s)

    async def _exchange(self, line: bytes, limit_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                process.stdin.write(line)
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError:
            await self.kill()
            return {"failure": f"no verdict within {limit_s:g} s; the worker was killed"}
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if not answer.endswith(b"\n"):
            code = await self.kill()
            return {"failure": f"the worker died ({_describe_exit(code)})"}
        return json.loads(answer)  # type: ignore[no-any-return]

    async def kill(self) -> int | None:
        """Ends and reaps the process; returns its exit code (negative: the signal), None without a process."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.stdout is not None and process.stdout.at_eof():
            try:  # it is ending by itself: let its own exit code be seen
                async with asyncio.timeout(1.0):
                    return await process.wait()
            except TimeoutError:
                pass
        if process.returncode is None:
            process.kill()
        return await process.wait()


def _worker_env() -> dict[str, str]:
    package_parent = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = package_parent if inherited is None else os.pathsep.join([package_parent, inherited])
    # One thread each: the workers are the parallelism.
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code}"
    return f"exit code {code}"
