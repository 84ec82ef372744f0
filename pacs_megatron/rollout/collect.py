"""Collects a step's samples on every rank: sends requests to the driver, samples with the embedded
engine, shares facts.

Concurrency: collective. Rank 0 exchanges messages with the driver and sends each response that
concerns all ranks as a decision. The other ranks wait in `ControlChannel.receive` for it:

    generate   every rank samples its share; rank 0 gathers the samples for the driver
    stop       every rank raises the error or Interrupted
    others     the response of the request
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pacs_megatron.batching.tables import FACTS
from pacs_megatron.contracts import Interrupted, Sample, SampleFacts, SampleRequest, TokenBuffers
from pacs_megatron.embedded.engine import EmbeddedEngine
from pacs_megatron.errors import PacsError, RolloutError, named_error
from pacs_megatron.parallel.control import ControlChannel
from pacs_megatron.parallel.transfer import broadcast_arrays, gather_arrays, gather_json
from pacs_megatron.rollout.driver_client import DriverClient
from pacs_megatron.rollout.passk import ProblemCounts
from pacs_megatron.rollout.sample_arrays import (
    Message,
    requests_from_message,
    samples_from_message,
    samples_to_message,
)

logger = logging.getLogger(__name__)
_MAX_RESENDS = 5


class StepSamples(NamedTuple):
    """Admitted samples of a step. Only rank 0 has `tokens`, the payload of the whole step."""

    facts: SampleFacts
    tokens: TokenBuffers | None
    metrics: dict[str, float]


class DriverState(NamedTuple):
    """The driver's part of a checkpoint: position in the data, samples of later steps.

    Empty on all ranks but 0.
    """

    order: dict[str, Any] | None
    buffer: Message | None


class Rollouts:
    """The collective requests to the driver. Every method is called by all ranks together."""

    def __init__(
        self,
        channel: ControlChannel,
        driver: DriverClient | None,
        engine: EmbeddedEngine | None,
        *,
        should_stop: Callable[[], bool],
    ) -> None:
        """Sends nothing.

        Args:
            channel: of all ranks.
            driver: on rank 0.
            engine: the embedded engine; None with SGLang and with demonstrations.
            should_stop: whether this rank has a stop request.
        """
        self._rank = channel.rank
        self._channel = channel
        self._driver = driver
        self._engine = engine
        self._should_stop = should_stop
        self._orders: dict[int, dict[str, Any]] = {}
        """on rank 0: trained steps -> position in the data, of the last two boundaries"""
        self.span: Callable[[str], AbstractContextManager[None]] = lambda _name: nullcontext()
        """opens the span `generate` around this rank's own sampling"""
        self.send_weights: Callable[[int], None]
        """sends the weights after the given number of steps to the rollout engine again;
        collective. The loop sets it
        """

    def collect(self, step: int) -> StepSamples:
        """The admitted samples of `step`. Raises the driver's error on every rank."""
        header, arrays = self._exchange({"op": "rollout", "step": step}, trained=step - 1)
        facts_arrays = None
        tokens = None
        if self._rank.rank == 0:
            self._remember_order(step, header["order"])
            facts_arrays = {name: arrays.pop(name) for name in FACTS}
            tokens = TokenBuffers(**arrays)
        shared = broadcast_arrays(facts_arrays, src=0, group=self._rank.control)
        facts = SampleFacts(ids=tuple(header["ids"]), **shared)
        return StepSamples(facts=facts, tokens=tokens, metrics=header["metrics"])

    def evaluate(self, step: int) -> dict[str, list[ProblemCounts]]:
        """Benchmark -> counts of every problem, with the weights after `step`.

        Raises the driver's error on every rank.
        """
        header, _ = self._exchange({"op": "evaluate", "step": step}, trained=step)
        return {
            name: [ProblemCounts(**counts) for counts in problems]
            for name, problems in header["benchmarks"].items()
        }

    def state(self, trained: int, *, final: bool, at_boundary: bool) -> DriverState:
        """State for the checkpoint after `trained` steps; empty on all ranks but 0.

        If the driver is dead or does not respond, a checkpoint at a boundary has the position that
        rank 0 remembers, without samples of later steps.

        Args:
            trained: number of complete steps.
            final: whether the run ends after this checkpoint.
            at_boundary: whether the checkpoint is between two steps, not inside one.

        Raises:
            RolloutError: on every rank.
        """
        request = {"op": "state", "trained": trained, "final": final}

        def call() -> DriverState:
            if self._driver is None:
                return DriverState(None, None)
            try:
                header, arrays = self._driver.call(request)
            except RolloutError as error:
                if not at_boundary or trained not in self._orders:
                    raise
                logger.warning(
                    "%s; step %d is saved without samples of later steps", error, trained
                )
                return DriverState(self._orders[trained], None)

            buffer = header["buffer"]
            return DriverState(header["order"], (buffer, arrays) if buffer["steps"] else None)

        return self._channel.run_together(call)

    def load_state(self, saved: DriverState, trained: int) -> None:
        """Inverse of `state`; reads `saved` on rank 0 only. Raises on every rank."""
        buffer, arrays = saved.buffer or (None, None)
        self._remember_order(trained, saved.order if buffer is None else None)
        request = {"op": "load_state", "order": saved.order, "buffer": buffer}

        def call() -> None:
            if self._driver is not None:
                header, _ = self._driver.call(request, arrays)
                for line in header["notices"]:
                    logger.warning("%s", line)

        self._channel.run_together(call)

    def _remember_order(self, trained: int, order: dict[str, Any] | None) -> None:
        """Remembers the position in the data after `trained` steps, and the one before it."""
        previous = self._orders.get(trained - 1)
        self._orders = {}
        if previous is not None:
            self._orders[trained - 1] = previous
        if order is not None:
            self._orders[trained] = order

    def _exchange(self, request: Mapping[str, Any], trained: int) -> Message:
        """The response to `request` on every rank, its arrays on rank 0.

        If all servers restarted meanwhile, sends the weights after `trained` steps to them and
        retries.
        """
        for resends in range(_MAX_RESENDS + 1):
            if resends:
                self.send_weights(trained)
            header, arrays = self._exchange_once(request)
            if header["kind"] != "stale":
                return header, arrays
        raise RolloutError(
            f"the rollout servers lost their weights {_MAX_RESENDS + 1} times during one request; "
            "see the logs in servers/ of the run's folder"
        )

    def _exchange_once(self, request: Mapping[str, Any]) -> Message:
        if self._rank.rank:
            return self._follow(), {}
        assert self._driver is not None
        driver = self._driver
        header, arrays = self._response(partial(driver.send, request))
        while header["kind"] == "generate":
            self._channel.send(header)
            # Not inside `_response`, because `_generate` already raises its errors on every rank.
            samples, payload, is_stopped = self._generate(header, arrays)
            reply = {"op": "samples", **samples}
            if is_stopped:
                # Every rank stops. The finished samples go into the checkpoint.
                with suppress(RolloutError):  # `state` reports a lost driver
                    driver.reply(reply, payload, lambda: None)
                    driver.abandon()
                raise Interrupted
            header, arrays = self._response(partial(driver.reply, reply, payload))
        self._channel.send(header)
        return header, arrays

    def _response(self, send: Callable[..., None]) -> Message:
        """Rank 0: sends a message and returns the driver's response.

        An error is sent to the other ranks, then raised.
        """
        assert self._driver is not None
        try:
            send(on_wait=self._channel.heartbeat)
            header, arrays = self._driver.receive(on_wait=self._heartbeat)
            if header["kind"] == "generate":
                self._raise_if_stop_requested()  # sampling may take long
            return header, arrays
        except (PacsError, Interrupted) as caught:
            error = caught
            if self._driver.is_lost and self._should_stop():
                error = Interrupted()
            self._driver.abandon()
            self._channel.send(
                {"kind": "stop", "type": type(error).__name__, "message": str(error)}
            )
            raise error from caught

    def _heartbeat(self) -> None:
        """Called while the other ranks are in `receive`.

        A stop request ends the wait, because generation may take long.
        """
        self._raise_if_stop_requested()
        self._channel.heartbeat()

    def _raise_if_stop_requested(self) -> None:
        if self._should_stop():
            raise Interrupted

    def _follow(self) -> dict[str, Any]:
        """All ranks but 0: follows rank 0's decisions; returns the header of the response."""
        while True:
            decision = self._channel.receive()
            match decision["kind"]:
                case "generate":
                    _, _, is_stopped = self._generate(decision, None)
                    if is_stopped:
                        raise Interrupted
                case "stop" if decision["type"] == Interrupted.__name__:
                    raise Interrupted
                case "stop":
                    raise named_error(decision["type"], decision["message"])
                case _:
                    return decision

    def _generate(
        self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray], bool]:
        """Samples the requests of a `generate` message on all ranks.

        Every rank samples its chunks; a rank with a stop request stops between two chunks.

        Args:
            header: the message.
            arrays: of the message, on rank 0; None elsewhere.

        Returns:
            Header and arrays of all samples, on rank 0; empty elsewhere.
            Whether any rank has a stop request.
        """
        assert self._engine is not None
        shared = broadcast_arrays(arrays, src=0, group=self._rank.control)
        requests = requests_from_message(header, shared)
        samples: list[Sample] = []
        is_stopped = self._channel.any_rank(
            self._channel.run_together(partial(self._timed_sample, requests, samples))
        )

        rank_header, rank_arrays = samples_to_message(samples)
        headers = gather_json(rank_header, group=self._rank.control)
        gathered = gather_arrays(rank_arrays, group=self._rank.control)
        if headers is None or gathered is None:
            return {}, {}, is_stopped
        all_samples: list[Sample] = []
        for share_header, share_arrays in zip(headers, gathered, strict=True):
            all_samples += samples_from_message(share_header, share_arrays)
        all_header, all_arrays = samples_to_message(all_samples)
        return all_header, all_arrays, is_stopped

    def _timed_sample(self, requests: Sequence[SampleRequest], samples: list[Sample]) -> bool:
        with self.span("generate"):
            return self._sample(requests, samples)

    def _sample(self, requests: Sequence[SampleRequest], samples: list[Sample]) -> bool:
        """Appends this rank's share to `samples`. Returns whether a stop request ended it early."""
        assert self._engine is not None
        try:
            for sample in self._engine.stream(requests, self._should_stop):
                samples.append(sample)
                self._channel.on_heartbeat()
                if self._driver is not None:
                    # An estimate: other ranks sample about as fast.
                    done = min(len(requests), len(samples) * self._rank.layout.world_size)
                    self._driver.on_progress(done, len(requests), False)
        except Interrupted:
            return True
        return False
