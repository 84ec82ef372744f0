"""Worker processes that run tools under limits of time, memory and output.

Concurrency: one thread per worker takes submitted calls from a queue, sends each over a socket,
waits for its result and calls `done`. After the time limit or the death of a worker, the thread
kills it with all its child processes and starts a new one.
"""

import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from pacs_megatron.config.agent_options import AgentOptions, ToolOptions
from pacs_megatron.errors import AgentError, ConfigError, DataError
from pacs_megatron.runtime.closing import Closing
from pacs_megatron.runtime.json_reader import as_object, parse_json
from pacs_megatron.runtime.worker_process import WorkerProcess

logger = logging.getLogger(__name__)
_START_LIMIT_S = 120.0
_GRACE_S = 1.0
"""Added to the limit of a call, so that a tool's own limit ends it first"""


class CallResult(NamedTuple):
    """Exactly one of `text` and `failure` is None."""

    text: str | None
    failure: str | None
    timed_out: bool = False
    """whether a limit of time ended the call"""
    cut: bool = False
    """whether the text was longer than `call_chars`"""


class _Call(NamedTuple):
    tool: str
    arguments: Mapping[str, Any]
    done: Callable[[CallResult], None]


class ToolPool(Closing):
    """`options.tool_workers` processes. A context manager; it must be closed."""

    def __init__(self, options: AgentOptions) -> None:
        """Starts the workers and waits until all are ready.

        Raises ConfigError if a tool cannot be built, AgentError if a worker does not start.
        """
        self._options = options
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        """None: the pool has ended"""
        self._is_closed = False
        count = options.tool_workers if options.tools else 0
        self._workers = [_ToolWorker(options) for _ in range(count)]
        ready: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._serve, args=(worker, ready), name=f"tool-{number}", daemon=True
            )
            for number, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()
        errors = [ready.get() for _ in self._workers]
        for error in errors:
            if error is not None:
                self.close()
                raise error

    def submit(
        self, tool: str, arguments: Mapping[str, Any], done: Callable[[CallResult], None]
    ) -> None:
        """Queues a call; a thread of the pool calls `done` with its result, unless the pool ends
        before.
        """
        self._queue.put(_Call(tool, arguments, done))

    def close(self) -> None:
        """Kills every worker with its child processes."""
        self._is_closed = True
        self._queue.put(None)
        for worker in self._workers:
            worker.end()
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: "_ToolWorker", ready: "queue.SimpleQueue[Exception | None]") -> None:
        """The body of a worker's thread."""
        try:
            worker.start()
            ready.put(None)
        except (ConfigError, AgentError) as error:
            ready.put(error)

        while call := self._queue.get():
            result = worker.run(call.tool, call.arguments)
            if self._is_closed:
                break
            call.done(result)
        self._queue.put(None)  # for the other threads
        worker.kill()


class _ToolWorker(WorkerProcess):
    """One process that runs tools."""

    def __init__(self, options: AgentOptions) -> None:
        super().__init__(
            "pacs_megatron.agents.tool_worker",
            options.memory_limit_gib,
            "rollout.agent.memory_limit_gib",
        )
        self._options = options

    def start(self) -> None:
        """Starts the process and waits for its `ready`. Raises ConfigError or AgentError."""
        if not self.launch():
            raise AgentError("tool pool: it is closed")
        options = self._options
        adapter: TypeAdapter[dict[str, ToolOptions]] = TypeAdapter(dict[str, ToolOptions])
        setup = {
            "tools": adapter.dump_json(options.tools).decode(),
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "memory_limit_bytes": int(options.memory_limit_gib * 2**30),
            "seconds": options.call_timeout_s,
            "chars": options.call_chars,
        }
        reply = self._exchange(setup, _START_LIMIT_S)
        if "error" in reply:
            raise ConfigError(str(reply["error"]))
        if "failure" in reply:
            raise AgentError(
                f"tool worker did not start: {reply['failure']}; its stderr has the reason"
            )

    def run(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """The result of a call; a failure if no new process starts."""
        try:
            if not self.is_started:  # killed in the call before
                self.start()
        except (ConfigError, AgentError) as error:
            return CallResult(None, str(error))
        self.allow_output()
        limit_s = self._options.call_timeout_s + _GRACE_S
        reply = self._exchange({"tool": tool, "arguments": arguments}, limit_s)
        text = reply.get("text")
        if isinstance(text, str):
            return CallResult(text, None, cut=bool(reply.get("cut")))
        failure = str(reply.get("failure", "no result"))
        return CallResult(None, failure, timed_out=bool(reply.get("timed_out")))

    def _exchange(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The reply, or `failure` with the reason why there is none."""
        line = json.dumps(message).encode() + b"\n"
        try:
            reply = self.exchange(line, limit_s, "result")
        except (TimeoutError, MemoryError) as error:
            self.kill()
            timed_out = isinstance(error, TimeoutError)
            return {"failure": f"{error}; it was killed", "timed_out": timed_out}
        except OSError:
            reply = b""
        if not reply.endswith(b"\n"):
            code = self.kill()
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            return {"failure": f"its process died ({how})"}
        try:
            return as_object(parse_json(reply, "result", any_text=True), "result")
        except DataError as error:
            self.kill()
            return {"failure": f"its process sent no result ({error})"}
