"""Collects a step's samples on every rank: sends requests to the driver, samples with the embedded
engine, shares facts.

Concurrency: collective. Rank 0 exchanges messages with the driver. The other ranks wait in
`ControlChannel.receive` until `generate` (sample this rank's share) or the last decision of the
request.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
    def __init__(
        self, channel: ControlChannel, driver: DriverClient | None, engine: EmbeddedEngine | None, *,
        should_stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._rank = channel.rank
        self._channel = channel
        self._driver = driver
        self._engine = engine
        self._should_stop = should_stop
        self._orders: dict[int, dict[str, Any]] = {}
        """on rank 0: steps trained -> position in the data, of the last boundaries"""
        self.send_weights: Callable[[int], None]
        """sends the weights after the given number of steps to the rollout engine again;
        collective. The loop sets it
        """

    def collect(self, step: int) -> StepSamples:
        """The admitted samples of `step`. Raises the driver's error on every rank."""
        header, arrays = self._exchange({"op": "rollout", "step": step}, trained=step - 1)
        own = None
        tokens = None
        if self._rank.rank == 0:
            self._keep_order(step, header["order"])
            own = {name: arrays.pop(name) for name in FACTS}
            tokens = TokenBuffers(**arrays)
        shared = broadcast_arrays(own, src=0, group=self._rank.control)
        facts = SampleFacts(ids=tuple(header["ids"]), **shared)
        return StepSamples(facts=facts, tokens=tokens, metrics=header["metrics"])

    def evaluate(self, step: int) -> dict[str, list[ProblemCounts]]:
        header, _ = self._exchange({"op": "evaluate", "step": step}, trained=step)
        return {
            name: [ProblemCounts(**counts) for counts in found]
            for name, found in header["benchmarks"].items()
        }

    def state(self, trained: int, *, final: bool, at_boundary: bool) -> DriverState:
        """State for the checkpoint after `trained` steps; empty on all ranks but 0.

        Collective; raises on every rank.

        `final`: the run ends after this checkpoint. If the driver is dead or does not respond, a
        checkpoint `at_boundary` of two steps is saved without samples of later steps.
        """

        def call() -> DriverState:
            if self._driver is None:
                return DriverState(None, None)
            try:
                header, arrays = self._driver.call(
                    {"op": "state", "trained": trained, "final": final}
                )
            except RolloutError as error:
                if not at_boundary or trained not in self._orders:
                    raise
                logger.warning(
                    "%s; step %d is saved without samples of later steps", error, trained
                )
                return DriverState(self._orders[trained], None)
            return DriverState(
                header["order"], (header["buffer"], arrays) if header["buffer"]["steps"] else None
            )

        return self._channel.run_together(call)

    def load_state(self, saved: DriverState, trained: int) -> None:
        """Inverse of `state`; reads `saved` on rank 0 only. Collective; raises on every rank."""
        buffer, arrays = saved.buffer or (None, None)
        self._keep_order(trained, saved.order if buffer is None else None)
        request = {"op": "load_state", "order": saved.order, "buffer": buffer}
        driver = self._driver
        self._channel.run_together(lambda: driver and driver.call(request, arrays))

    def _keep_order(self, trained: int, order: dict[str, Any] | None) -> None:
        self._orders = {step: kept for step, kept in self._orders.items() if step == trained - 1}
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
        lost = f"the rollout servers lost their weights {_MAX_RESENDS + 1} times during one request"
        raise RolloutError(f"{lost}; see the logs in servers/ of the run's folder")

    def _exchange_once(self, request: Mapping[str, Any]) -> Message:
        if self._rank.rank:
            return self._follow(), {}
        assert self._driver is not None
        driver = self._driver
        header, arrays = self._response(partial(driver.send, request))
        while header["kind"] == "generate":
            self._channel.send(header)
            # Not inside `_response`, because `_generate` already raises its errors on every rank.
            samples, payload, stopped = self._generate(header, arrays)
            if stopped:
                # Every rank stops. The finished samples go into the checkpoint.
                with suppress(RolloutError):  # `state` reports a lost driver
                    driver.reply({"op": "samples", **samples}, payload, lambda: None)
                    driver.abandon()
                raise Interrupted
            header, arrays = self._response(
                partial(driver.reply, {"op": "samples", **samples}, payload)
            )
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
            error = Interrupted() if self._driver.is_lost and self._should_stop() else caught
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
        while True:
            decision = self._channel.receive()
            match decision["kind"]:
                case "generate":
                    if self._generate(decision, None)[2]:
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
        """(header, arrays, is stopped): all samples on rank 0, and whether any rank has a stop
        request. Collective.

        Every rank samples its chunks; a rank with a stop request stops between two chunks.
        """
        assert self._engine is not None
        shared = broadcast_arrays(arrays, src=0, group=self._rank.control)
        requests = requests_from_message(header, shared)
        samples: list[Sample] = []
        stopped = self._channel.any_rank(
            self._channel.run_together(partial(self._sample, requests, samples))
        )
        own_header, own = samples_to_message(samples)
        headers = gather_json(own_header, group=self._rank.control)
        gathered = gather_arrays(own, group=self._rank.control)
        if headers is None or gathered is None:
            return {}, {}, stopped
        everything = [
            s for part in zip(headers, gathered, strict=True) for s in samples_from_message(*part)
        ]
        return *samples_to_message(everything), stopped

    def _sample(self, requests: Sequence[SampleRequest], samples: list[Sample]) -> bool:
        """Appends this rank's share to `samples`. Returns whether a stop request ended it early."""
        assert self._engine is not None
        try:
            for sample in self._engine.stream(requests, self._should_stop):
                samples.append(sample)
                self._channel.on_heartbeat()
                if self._driver is not None:  # an estimate: other ranks sample about as fast
                    done = min(len(requests), len(samples) * self._rank.layout.world_size)
                    self._driver.on_progress(done, len(requests), False)
        except Interrupted:
            return True
        return False
