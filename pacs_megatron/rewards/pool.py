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
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from pacs_megatron.config.reward_options import AnyReward
from pacs_megatron.contracts import Prompt, Turn
from pacs_megatron.errors import ConfigError, DataError, RewardError
from pacs_megatron.rewards.judging import JudgeInput
from pacs_megatron.rewards.worker import encode_inputs
from pacs_megatron.runtime.closing import Closing
from pacs_megatron.runtime.json_reader import as_object, parse_json
from pacs_megatron.runtime.waiting import report_wait
from pacs_megatron.runtime.worker_process import WorkerProcess

logger = logging.getLogger(__name__)
T = TypeVar("T")

_START_LIMIT_S = 120.0
"""Timeout of a worker's imports; a user's module may be large and the host busy."""


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
    turns: tuple[Turn, ...]
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
        self,
        key: str,
        prompt: Prompt,
        response: str,
        done: Callable[[Verdict | RewardError], None],
        turns: Sequence[Turn] = (),
    ) -> None:
        """Queues one response, of an agent with its turns, from any thread.

        A thread of the pool calls `done` with the verdict of `key` (the sample id), or with the
        RewardError that ended the pool. Raises RewardError if the pool has ended.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            self._queue.put(_Pending(key, prompt, response, tuple(turns), done))

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


class _Worker(WorkerProcess):
    """One process that judges. One thread owns it; other threads may call `end`."""

    def __init__(self, options: AnyReward) -> None:
        super().__init__(
            "pacs_megatron.rewards.worker", options.memory_limit_gib, "reward.memory_limit_gib"
        )
        self._options = options

    def start(self) -> None:
        """Starts the process and waits for its `ready`. Raises ConfigError or RewardError."""
        if not self.launch():
            raise RewardError("reward pool: it is closed")

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
        if not self.is_started:  # killed in the call before
            self.start()
        self.allow_output()
        inputs = [JudgeInput(item.prompt, item.response, item.turns) for item in pending]
        line = self._encode(inputs)
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

    def _encode(self, inputs: Sequence[JudgeInput]) -> bytes:
        return encode_inputs(inputs, with_token_ids=self._options.reads_token_ids)

    def _without_reply(
        self, reply: dict[str, Any], pending: Sequence[_Pending]
    ) -> list[dict[str, Any]]:
        """The results of a call that failed, e.g. by the time limit: no verdict.

        With `math` a response is wrong if only it, not the gold answer, makes sympy hang.
        """
        if self._options.name != "math":
            return [reply] * len(pending)
        golds = [JudgeInput(item.prompt, f"\\boxed{{{item.prompt.answer}}}") for item in pending]
        self.start()
        judged = self._exchange(self._encode(golds), self._options.call_limit_s)
        verified = [result.get("reward") == 1.0 for result in judged.get("verdicts", [])]
        if len(verified) != len(pending) or not all(verified):
            return [reply] * len(pending)
        return [{"reward": 0.0, "details": {"answer": reply["failure"]}}] * len(pending)

    def _exchange(self, line: bytes, limit_s: float) -> dict[str, Any]:
        """Sends a line and returns the reply, or `failure` with the reason why there is none."""
        try:
            reply = self.exchange(line, limit_s, "verdict")
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
