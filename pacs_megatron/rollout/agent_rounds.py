"""Agents with the embedded engine, which samples the next turn of all open trajectories as one
batch, a round.

A round starts when every open trajectory waits for its next turn. So its batch depends on no speed
of an agent or of a tool, as long as none exceeds its limit of time.

Concurrency: one thread begins plays, takes what has happened and delivers turns; the pool's
callbacks run in the pool's thread.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from pacs_megatron.agents.pool import AgentPool, Callbacks
from pacs_megatron.config.agent_options import AgentOptions
from pacs_megatron.config.schema import DataOptions
from pacs_megatron.contracts import Prompt, Sample, SampleRequest
from pacs_megatron.data.turns import TurnEncoder, derive_markers
from pacs_megatron.errors import AgentError, PacsError
from pacs_megatron.runtime.closing import Closing


def build_encoder(
    options: AgentOptions, data: DataOptions, tokenizer: Any, now: datetime
) -> TurnEncoder:
    """The encoder of messages. Raises DataError for a chat template that has no fixed markers."""
    markers = options.turn_markers
    if markers is None:
        markers = derive_markers(options.roles, data, tokenizer, now)
    return TurnEncoder(markers, tokenizer)


class AgentRounds(Closing):
    """An agent pool whose turns are sampled in rounds. A context manager; it must be closed."""

    def __init__(
        self,
        options: AgentOptions,
        encoder: TurnEncoder,
        stops: Sequence[int],
        decode: Callable[[np.ndarray], str],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the pool. Raises ConfigError or AgentError.

        Args:
            options: of the agents.
            encoder: of messages.
            stops: tokens that end a turn.
            decode: token ids to text; thread-safe.
            wake: called in the pool's thread when `take` has something new.
        """
        self._wake = wake
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._order: dict[str, int] = {}
        """id of an open trajectory -> its place"""
        self._finished: list[Sample] = []
        self._turns: list[SampleRequest] = []
        """turns that the policy has to write"""
        self._num_left = 0
        """trajectories of the play that `take` has not returned"""
        self._is_quiet = False
        self._error: PacsError | None = None
        callbacks = Callbacks(
            request_turn=self._requested,
            done=self._done,
            changed=self._changed,
            failed=self._failed,
        )
        self._pool = AgentPool(options, encoder, stops, decode, callbacks)

    def play(
        self,
        requests: Sequence[SampleRequest],
        prompts: Mapping[str, Prompt],
        sample_turns: Callable[[Sequence[SampleRequest]], Iterable[Sample]],
    ) -> Iterator[Sample]:
        """Yields finished trajectories, one for each request, as they finish.

        A sample with `failure` has no response to judge. Closing the iterator ends the open
        trajectories.

        Args:
            requests: of whole responses; all with the same temperature and filters.
            prompts: prompt id -> prompt.
            sample_turns: the policy; it gets the turns of a round, in the order of `requests`.

        Raises:
            PacsError: the error that ended the pool, or of `sample_turns`.
        """
        self.begin(requests, prompts)
        try:
            while not self.is_done:
                self._woken.wait()
                finished, turns = self.take()
                if turns:
                    self.deliver(list(sample_turns(turns)))
                yield from finished
        finally:
            self.abandon()

    def begin(self, requests: Sequence[SampleRequest], prompts: Mapping[str, Prompt]) -> None:
        """Starts a trajectory for each request; ends those of an earlier play that are open.

        Args:
            requests: of whole responses; all with the same temperature and filters.
            prompts: prompt id -> prompt.
        """
        self.abandon()
        with self._lock:
            self._order = {request.id: place for place, request in enumerate(requests)}
        self._num_left = len(requests)
        self._pool.start(requests, prompts)

    @property
    def is_done(self) -> bool:
        """Whether `take` has returned a sample for each request of the play."""
        return self._num_left == 0

    def take(self) -> tuple[list[Sample], list[SampleRequest]]:
        """Finished trajectories, and the turns of the next round, in the order of the requests; no
        turns while an agent or a tool works. Raises the error that ended the pool.
        """
        with self._lock:
            self._woken.clear()
            if self._error is not None:
                raise self._error
            finished = self._finished
            self._finished = []
            self._num_left -= len(finished)
            if not self._is_quiet:
                return finished, []
            turns = sorted(self._turns, key=lambda request: self._order[request.id])
            self._turns = []
            self._is_quiet = False
            return finished, turns

    def deliver(self, turns: Sequence[Sample]) -> None:
        """The policy's turns of a round. Ignores those of abandoned trajectories."""
        self._pool.deliver(turns)

    def abandon(self) -> None:
        """Ends the open trajectories of the play."""
        with self._lock:
            open_ids = list(self._order)
            self._order = {}
        self._num_left = 0
        if open_ids:
            self._pool.cancel(open_ids)
        with self._lock:
            self._finished = []
            self._turns = []
            self._is_quiet = False

    def close(self) -> None:
        self._pool.close()

    # ----------------------------------------------------------------------------------------------
    # The methods below run in the pool's thread.

    def _requested(self, request: SampleRequest) -> None:
        with self._lock:
            if request.id in self._order:
                self._turns.append(request)

    def _done(self, sample: Sample) -> None:
        with self._lock:
            if self._order.pop(sample.id, None) is not None:
                self._finished.append(sample)
                # Its worker may have died while it waited for a turn.
                self._turns = [turn for turn in self._turns if turn.id != sample.id]
                self._notify()

    def _changed(self) -> None:
        if not self._pool.is_quiet:
            return
        with self._lock:
            if self._turns:
                self._is_quiet = True
                self._notify()

    def _failed(self, error: Exception) -> None:
        with self._lock:
            named = error if isinstance(error, PacsError) else AgentError(f"agents: {error!r}")
            self._error = self._error or named
            self._notify()

    def _notify(self) -> None:
        self._woken.set()
        self._wake()
