"""Runs agents in worker processes, one trajectory each.

Concurrency: one thread with a selector serves all workers. Other threads `start` trajectories and
`deliver` turns; their commands go through an inbox that wakes the thread. `request_turn` and
`done`, the pool's callbacks, run in its thread. Tools run in the threads of the tool pool.

    QUEUED --a worker is free--> AGENT --`generate`--> POLICY --`deliver`--> AGENT
    AGENT --`call`--> TOOL --result--> AGENT
    AGENT --`done`, `failed`, a limit--> finished
"""

import json
import logging
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pacs_megatron.agents.tool_pool import CallResult, ToolPool
from pacs_megatron.agents.trajectory import Trajectory
from pacs_megatron.config.agent_options import AgentOptions
from pacs_megatron.contracts import Prompt, Sample, SampleRequest, Stop, ToolCall
from pacs_megatron.contracts.samples import AGENT_FAILURE
from pacs_megatron.data.turns import Message, TurnEncoder
from pacs_megatron.errors import AgentError, ConfigError, DataError, RewardError
from pacs_megatron.rewards.labels import as_reward
from pacs_megatron.runtime.closing import Closing
from pacs_megatron.runtime.json_reader import as_object, parse_json
from pacs_megatron.runtime.worker_process import WorkerProcess

logger = logging.getLogger(__name__)
_START_LIMIT_S = 120.0
"""Timeout of a worker's imports"""
_TICK_S = 0.5
"""Interval of the checks of limits and of dead workers"""
_MEMORY_AFTER_S = 1.0
"""Time without an operation after which a worker's memory is measured"""
_OPERATION_BYTES = 8 << 20
"""Size limit of an operation: a longer one is a flood"""
_ARGUMENT_CHARS = 500
"""Characters of a call's arguments in the record of a sample"""


class Callbacks(NamedTuple):
    """Functions that the pool calls in its own thread."""

    request_turn: Callable[[SampleRequest], None]
    """The policy's next turn of a trajectory is required. The request has the trajectory's id;
    `deliver` takes the turn.
    """
    done: Callable[[Sample], None]
    """A trajectory is finished, with or without `failure`."""
    changed: Callable[[], None]
    """`AgentPool.is_quiet` may have changed."""
    failed: Callable[[Exception], None]
    """The pool has ended by an error of its own."""


class AgentPool(Closing):
    """`options.workers` processes that run `solve`. A context manager; it must be closed."""

    def __init__(
        self,
        options: AgentOptions,
        encoder: TurnEncoder,
        stops: Sequence[int],
        decode: Callable[[np.ndarray], str],
        callbacks: Callbacks,
    ) -> None:
        """Starts a first worker and the tools, and waits for them.

        Args:
            options: the function, tools and limits.
            encoder: of messages; only the pool's thread uses it.
            stops: tokens that end a turn.
            decode: token ids to text; thread-safe.
            callbacks: of the owner.

        Raises:
            ConfigError: the function or a tool cannot be loaded.
            AgentError: a worker does not start.
        """
        self._options = options
        self._encoder = encoder
        self._stops = frozenset(stops)
        self._decode = decode
        self._callbacks = callbacks
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queued: deque[_Open] = deque()
        self._open: dict[str, _Open] = {}
        """id -> trajectory that is not finished, queued ones too"""
        self._workers: list[_AgentWorker] = []
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)

        first = _AgentWorker(options)
        first.start_and_wait()
        try:
            self._tools = ToolPool(options)
        except Exception:
            first.kill()
            raise
        self._add(first)
        self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
        self._thread.start()

    def start(
        self,
        requests: Sequence[SampleRequest],
        prompts: Mapping[str, Prompt],
        *,
        urgent: bool = False,
    ) -> None:
        """Starts a trajectory for each request, in order, as workers become free; `urgent` ones
        before all queued ones.
        """
        self._do(partial(self._start, tuple(requests), prompts, urgent))

    def deliver(self, turns: Sequence[Sample]) -> None:
        """The policy's turns for requests of `request_turn`.

        Ignores those of cancelled trajectories.
        """
        self._do(partial(self._deliver, tuple(turns)))

    def cancel(self, ids: Sequence[str]) -> None:
        """Ends these trajectories without a sample. Ignores unknown ids.

        After it returns, no callback names them.
        """
        is_done = threading.Event()

        def cancel() -> None:
            self._cancel(ids)
            is_done.set()

        self._do(cancel)
        while not is_done.wait(_TICK_S) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """Kills every worker and tool with its child processes."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake()
        self._thread.join()
        self._tools.close()
        for worker in self._workers:
            worker.kill()
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake()

    def _wake(self) -> None:
        # With a full buffer the thread wakes up anyway.
        with suppress(BlockingIOError):
            self._waker.send(b"\0")

    # ----------------------------------------------------------------------------------------------
    # The methods below run in the pool's thread.

    def _serve(self) -> None:
        try:
            next_check = time.monotonic() + _TICK_S
            while not self._is_closed:
                for key, _ in self._selector.select(max(next_check - time.monotonic(), 0)):
                    if key.fileobj is self._woken:
                        self._woken.recv(1 << 16)
                    else:
                        self._read(key.data)
                while not self._commands.empty():
                    self._commands.get()()
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + _TICK_S
                    self._check_limits()
                self._fill()
                self._callbacks.changed()
        except Exception as error:
            logger.exception("the agent pool has ended")
            self._callbacks.failed(error)

    def _start(
        self, requests: Sequence[SampleRequest], prompts: Mapping[str, Prompt], urgent: bool
    ) -> None:
        started = []
        for request in requests:
            trajectory = Trajectory(request, self._encoder, self._stops)
            opened = _Open(trajectory, prompts[request.prompt_id])
            self._open[request.id] = opened
            started.append(opened)
        if urgent:
            self._queued.extendleft(reversed(started))
        else:
            self._queued.extend(started)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing goes on before a turn of the policy is delivered. For `changed`.

        Does not depend on the speed of workers: while a trajectory is queued, all workers are used.
        """
        num_waiting = 0
        for worker in self._workers:
            opened = worker.opened
            if opened is None:
                continue
            if opened.is_finished or opened.waits != "policy":
                return False
            num_waiting += 1
        if self._queued and num_waiting < self._options.workers:
            return False
        return num_waiting > 0

    def _deliver(self, turns: Sequence[Sample]) -> None:
        for turn in turns:
            opened = self._open.get(turn.id)
            if opened is None or opened.waits != "policy":
                continue
            opened.trajectory.add(turn)
            reply = {
                "text": self._decode(turn.response_ids),
                "stop": "length" if turn.stop is Stop.LENGTH else "eos",
                "tokens": turn.response_len,
            }
            self._reply(opened, reply)

    def _cancel(self, ids: Sequence[str]) -> None:
        for one in ids:
            opened = self._open.pop(one, None)
            if opened is None:
                continue
            if opened.worker is not None:
                self._drop(opened.worker)
            else:
                self._queued.remove(opened)

    def _fill(self) -> None:
        """Gives queued trajectories to free workers; starts workers up to their number."""
        free = deque(worker for worker in self._workers if worker.is_free)
        while self._queued and free:
            worker = free.popleft()
            opened = self._queued.popleft()
            opened.worker = worker
            worker.opened = opened
            worker.allow_output()
            prompt = opened.prompt
            problem: dict[str, Any] = {
                "id": prompt.id,
                "problem": prompt.problem,
                "prompt": prompt.text,
                "source": prompt.source,
            }
            if self._options.reads_answers:
                problem |= {"answer": prompt.answer, "extra": dict(prompt.extra)}
            self._reply(opened, {"problem": problem})

        num_starting = sum(not worker.is_ready for worker in self._workers)
        num_new = min(len(self._queued) - num_starting, self._options.workers - len(self._workers))
        for _ in range(num_new):
            worker = _AgentWorker(self._options)
            worker.begin_start()
            self._add(worker)

    def _add(self, worker: "_AgentWorker") -> None:
        self._workers.append(worker)
        self._selector.register(worker.open_channel(), selectors.EVENT_READ, worker)

    def _drop(self, worker: "_AgentWorker") -> int | None:
        """Kills a worker; returns its exit code. `_fill` starts another one when it is needed."""
        self._selector.unregister(worker.open_channel())
        self._workers.remove(worker)
        worker.opened = None
        return worker.kill()

    def _read(self, worker: "_AgentWorker") -> None:
        """Reads what a worker has sent, and handles complete operations."""
        try:
            piece = worker.open_channel().recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._lost(worker, "")
            return
        worker.received += piece
        if len(worker.received) > _OPERATION_BYTES:
            self._lost(worker, f"it sent more than {_OPERATION_BYTES >> 20} MiB at once")
            return
        if not worker.received.endswith(b"\n"):
            return
        line = bytes(worker.received)
        worker.received.clear()
        try:
            operation = as_object(parse_json(line, "operation", any_text=True), "operation")
            self._handle(worker, operation)
        except (DataError, KeyError, RewardError, TypeError, ValueError) as error:
            self._lost(worker, f"it sent no operation ({type(error).__name__}: {error})")

    def _handle(self, worker: "_AgentWorker", operation: Mapping[str, Any]) -> None:
        if not worker.is_ready:
            if "error" in operation:
                raise ConfigError(operation["error"])
            worker.is_ready = True
            return
        opened = worker.opened
        if opened is None:
            raise ValueError("an operation without a problem")
        opened.stop_clock()
        match operation["op"]:
            case "done":
                reward = operation["reward"]
                opened.trajectory.own_reward = None if reward is None else as_reward(reward)
                self._free(opened)
                self._finish(opened, None)
            case "failed":
                self._free(opened)
                self._finish(opened, f"{AGENT_FAILURE}{operation['reason']}")
            case _ if opened.is_finished:
                self._reply(opened, {"ended": "the trajectory has ended"})
            case "generate":
                self._generate(opened, operation)
            case "call":
                self._call(opened, str(operation["tool"]), operation["arguments"])
            case other:
                raise ValueError(f"operation {other!r}")

    def _generate(self, opened: "_Open", operation: Mapping[str, Any]) -> None:
        messages = [Message(one["role"], one["text"]) for one in operation["messages"]]
        trajectory = opened.trajectory
        if trajectory.turns >= self._options.max_turns:
            trajectory.truncate()
            self._end(opened, None, f"after rollout.agent.max_turns={self._options.max_turns}")
            return
        try:
            request = trajectory.next_request(messages, operation["max_tokens"], operation["stop"])
        except AgentError as error:
            self._reply(opened, {"error": str(error)})
            return
        if request is None:
            self._end(opened, None, "no token of max_response_tokens is left")
            return
        opened.waits = "policy"
        self._callbacks.request_turn(request)

    def _call(self, opened: "_Open", tool: str, arguments: Any) -> None:
        options = self._options
        if tool not in options.tools:
            names = ", ".join(options.tools) or "none"
            self._reply(opened, {"error": f"call({tool!r}): rollout.agent.tools has {names}"})
            return
        opened.waits = "tool"
        text = json.dumps(arguments)[:_ARGUMENT_CHARS]
        received = partial(self._called, opened, tool, text, time.monotonic())
        if len(opened.trajectory.calls) >= options.max_calls:
            received(CallResult(None, f"more than {options.max_calls} calls"))
            return
        self._tools.submit(tool, arguments, lambda result: self._do(partial(received, result)))

    def _called(
        self, opened: "_Open", tool: str, arguments: str, since: float, result: CallResult
    ) -> None:
        """Handles the result of a tool."""
        if self._open.get(opened.id) is not opened or opened.waits != "tool":
            return  # cancelled meanwhile
        call = ToolCall(
            tool=tool,
            arguments=arguments,
            failure=result.failure,
            seconds=time.monotonic() - since,
            turn=opened.trajectory.num_turns,
            timed_out=result.timed_out,
            cut=result.cut,
        )
        opened.trajectory.calls.append(call)
        if result.failure is None:
            self._reply(opened, {"text": result.text})
        elif self._options.on_tool_failure == "end":
            self._end(opened, f"{AGENT_FAILURE}tool {tool}: {result.failure}", "a tool failed")
        else:
            self._reply(opened, {"text": f"[{tool} failed: {result.failure}]"})

    def _reply(self, opened: "_Open", message: Mapping[str, Any]) -> None:
        """Sends the reply to the worker's operation; its clock runs from now on."""
        worker = opened.worker
        assert worker is not None
        opened.waits = "agent"
        opened.start_clock()
        line = json.dumps(message).encode() + b"\n"
        channel = worker.open_channel()
        try:
            # The worker reads: it has sent an operation and waits for this line.
            channel.settimeout(_TICK_S)
            channel.sendall(line)
            channel.setblocking(False)
        except OSError:
            self._lost(worker, "it does not read replies")

    def _end(self, opened: "_Open", failure: str | None, reason: str) -> None:
        """Finishes a trajectory before its agent has returned, and notifies the agent."""
        self._finish(opened, failure)
        self._reply(opened, {"ended": reason})

    def _finish(self, opened: "_Open", failure: str | None) -> None:
        """Passes the sample on, once."""
        if opened.is_finished:
            return
        opened.is_finished = True
        if failure is not None:
            logger.warning("trajectory %s has no verdict: %s", opened.id, failure)
        self._open.pop(opened.id, None)
        self._callbacks.done(opened.trajectory.finished(failure))

    def _free(self, opened: "_Open") -> None:
        """Makes the worker of a returned agent free for another trajectory."""
        assert opened.worker is not None
        opened.worker.opened = None
        opened.worker = None

    def _lost(self, worker: "_AgentWorker", reason: str) -> None:
        """Ends a worker that died or broke the protocol; its trajectory fails."""
        opened = worker.opened
        was_ready = worker.is_ready
        code = self._drop(worker)
        if not reason:
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            reason = f"its worker died ({how})"
        if not was_ready:
            raise AgentError(f"agent worker did not start: {reason}; its stderr has the reason")
        if opened is not None:
            opened.worker = None
            self._finish(opened, f"{AGENT_FAILURE}{reason}")

    def _check_limits(self) -> None:
        """Ends workers above their limits, and dead ones whose socket a grandchild keeps open."""
        for worker in list(self._workers):
            if not worker.is_running():
                self._lost(worker, "")
                continue
            opened = worker.opened
            if opened is None or opened.waits != "agent":
                continue
            if opened.seconds > self._options.timeout_s:
                limit = f"rollout.agent.timeout_s={self._options.timeout_s:g}"
                self._lost(worker, f"it took longer than {limit} and was killed")
                continue
            if opened.idle_s < _MEMORY_AFTER_S:
                continue  # a measurement reads every process of the host
            try:
                worker.check_memory()
            except MemoryError as error:
                self._lost(worker, f"{error}; it was killed")


class _Open:
    """A trajectory that is not finished, and its agent's clock."""

    def __init__(self, trajectory: Trajectory, prompt: Prompt) -> None:
        self.trajectory = trajectory
        self.prompt = prompt
        self.id = trajectory.request.id
        self.worker: _AgentWorker | None = None
        self.waits = ""
        """agent, policy or tool; empty while it is queued"""
        self.is_finished = False
        self._used_s = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Time that the agent itself has used."""
        return self._used_s + self.idle_s

    @property
    def idle_s(self) -> float:
        """Time since the last reply to the agent."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def start_clock(self) -> None:
        self._since = time.monotonic()

    def stop_clock(self) -> None:
        self._used_s = self.seconds
        self._since = None


class _AgentWorker(WorkerProcess):
    """One process that runs agents."""

    def __init__(self, options: AgentOptions) -> None:
        super().__init__(
            "pacs_megatron.agents.worker",
            options.memory_limit_gib,
            "rollout.agent.memory_limit_gib",
        )
        self._options = options
        self.received = bytearray()
        """the part of an operation that has arrived"""
        self.is_ready = False
        self.opened: _Open | None = None

    @property
    def is_free(self) -> bool:
        return self.is_ready and self.opened is None

    def begin_start(self) -> None:
        """Starts the process; its first line reports that it is ready."""
        self.launch()
        channel = self.open_channel()
        channel.settimeout(_START_LIMIT_S)
        with suppress(OSError):  # the selector reports it
            channel.sendall(self._setup())
        channel.setblocking(False)

    def start_and_wait(self) -> None:
        """Starts the process and waits until it is ready. Raises ConfigError or AgentError."""
        self.launch()
        try:
            line = self.exchange(self._setup(), _START_LIMIT_S, "start")
            reply = json.loads(line)
        except (OSError, MemoryError, ValueError) as error:
            code = self.kill()
            raise AgentError(
                f"agent worker did not start: {error} (exit code {code}); its stderr has the reason"
            ) from error
        if "error" in reply:
            self.kill()
            raise ConfigError(reply["error"])
        self.is_ready = True

    def _setup(self) -> bytes:
        setup = {
            "function": self._options.function,
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "memory_limit_bytes": int(self._options.memory_limit_gib * 2**30),
        }
        return json.dumps(setup).encode() + b"\n"
