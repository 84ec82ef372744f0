"""Agents with SGLang servers: each turn of a trajectory is a request with its exact tokens so far.

A trajectory stays on one server while it lives, whose cache has its earlier tokens. Its turns do
not wait for those of others; weights that change between two turns give spans of two versions.

Concurrency: `stream` and `cancel` run in threads of the callers, the pool's callbacks in the pool's
thread, and the engine delivers turns in its own thread. A lock guards the open trajectories.
"""

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial

import numpy as np

from pacs_megatron.agents.pool import AgentPool, Callbacks
from pacs_megatron.config.agent_options import AgentOptions
from pacs_megatron.contracts import Prompt, Sample, SampleRequest
from pacs_megatron.data.turns import TurnEncoder
from pacs_megatron.errors import AgentError, PacsError, RolloutError
from pacs_megatron.runtime.closing import Closing
from pacs_megatron.sglang.client import SglangEngine

_Results = queue.SimpleQueue["Sample | PacsError | None"]
"""Results of one `stream` call; None for a cancelled trajectory."""


class ServerAgents(Closing):
    """Samples trajectories as `SglangEngine` samples responses. It must be closed."""

    def __init__(
        self,
        engine: SglangEngine,
        options: AgentOptions,
        encoder: TurnEncoder,
        stops: Sequence[int],
        decode: Callable[[np.ndarray], str],
        prompt_of: Callable[[SampleRequest], Prompt],
    ) -> None:
        """Starts the pool. Raises ConfigError or AgentError.

        Args:
            engine: samples the turns; the owner closes it.
            options: of the agents.
            encoder: of messages.
            stops: tokens that end a turn.
            decode: token ids to text; thread-safe.
            prompt_of: the prompt of a request.
        """
        self._engine = engine
        self._prompt_of = prompt_of
        self._lock = threading.Lock()
        self._open: dict[str, _Results] = {}
        """id of an open trajectory -> its stream"""
        self._error: PacsError | None = None
        callbacks = Callbacks(
            request_turn=self._requested,
            done=self._done,
            changed=lambda: None,
            failed=self._failed,
        )
        self._pool = AgentPool(options, encoder, stops, decode, callbacks)

    def stream(
        self, requests: Sequence[SampleRequest], *, urgent: bool = False
    ) -> Generator[Sample, None, None]:
        """Yields finished trajectories, one per request that is not cancelled.

        Closing the generator ends the open trajectories. Parameters: same as `SglangEngine.stream`.

        Raises:
            RolloutError: a turn failed permanently.
            AgentError: the agents have ended.
        """
        results: _Results = queue.SimpleQueue()
        ids = [request.id for request in requests]
        with self._lock:
            if self._error is not None:
                raise self._error
            self._open |= dict.fromkeys(ids, results)
        prompts = {request.prompt_id: self._prompt_of(request) for request in requests}
        self._pool.start(requests, prompts, urgent=urgent)

        left = len(ids)
        try:
            while left:
                result = results.get()
                if isinstance(result, PacsError):
                    raise result
                left -= 1
                if result is not None:
                    yield result
        finally:
            if left:
                self.cancel(ids)

    def cancel(self, ids: Sequence[str]) -> None:
        """Ends these trajectories; samples already yielded stay. Ignores unknown ids."""
        with self._lock:
            ended = {one: self._open.pop(one) for one in ids if one in self._open}
        if not ended:
            return
        self._pool.cancel(list(ended))
        self._engine.cancel(list(ended))
        self._engine.end_turns(list(ended))
        for results in ended.values():
            results.put(None)

    def close(self) -> None:
        """Kills every worker and tool; open streams raise AgentError."""
        self._end(AgentError("the agents were closed"))
        self._pool.close()

    def _end(self, error: PacsError) -> None:
        """Ends all streams with `error`."""
        with self._lock:
            self._error = self._error or error
            streams = set(self._open.values())
            self._open = {}
        for results in streams:
            results.put(error)

    # ----------------------------------------------------------------------------------------------
    # The methods below run in the pool's thread.

    def _requested(self, request: SampleRequest) -> None:
        try:
            self._engine.submit_turn(request, partial(self._deliver, request.id))
        except RolloutError as error:
            self._deliver(request.id, error)

    def _done(self, sample: Sample) -> None:
        self._engine.end_turns([sample.id])
        with self._lock:
            results = self._open.pop(sample.id, None)
        if results is not None:
            results.put(sample)

    def _failed(self, error: Exception) -> None:
        self._end(error if isinstance(error, PacsError) else AgentError(f"agents: {error!r}"))

    # ----------------------------------------------------------------------------------------------
    # The engine's thread.

    def _deliver(self, sample_id: str, turn: Sample | BaseException | None) -> None:
        """Passes a turn to its trajectory, or its error to the stream."""
        with self._lock:
            results = self._open.get(sample_id)
        if results is None or turn is None:
            return  # cancelled, or closed
        if isinstance(turn, Sample):
            self._pool.deliver([turn])
        else:
            results.put(turn if isinstance(turn, PacsError) else RolloutError(f"turn: {turn!r}"))
