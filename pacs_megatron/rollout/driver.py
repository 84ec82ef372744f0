"""The driver: a process beside global rank 0, with its own GIL.

It owns prompt order, requests, rewards and admission.

Concurrency: rank 0 sends one request at a time over a socket; every response has the request's
number. The main thread waits for the socket and for the threads of the rollout buffer, which wake
it over a socket pair. During a long request (`rollout`, `evaluate`) it reports progress and handles
`abandon` and `state`. For the embedded engine the driver sends `generate` and rank 0 replies with
`samples` before the response. The driver ends when the socket closes; the kernel ends it when rank
0 dies. It ignores SIGINT, SIGTERM and SIGUSR1: rank 0 turns signals into decisions and then closes
the socket.
"""

import gc
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.config import load_config
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts import Prompt, SampleRequest
from pacs_megatron.data import load_tokenizer, stop_token_ids
from pacs_megatron.errors import CheckpointError, ExitCode, PacsError, RolloutError
from pacs_megatron.observability.logs import setup_logging
from pacs_megatron.rollout.agent_rounds import AgentRounds, build_encoder
from pacs_megatron.rollout.buffer import RolloutBuffer
from pacs_megatron.rollout.judging import Judge
from pacs_megatron.rollout.open_request import PROGRESS_INTERVAL_S, OpenRequest
from pacs_megatron.rollout.requests import evaluation_requests
from pacs_megatron.rollout.resampling import accuracy_of, num_extra_samples
from pacs_megatron.rollout.run_prompts import RunPrompts
from pacs_megatron.rollout.sample_arrays import Message, Reply, samples_from_message
from pacs_megatron.rollout.server_agents import ServerAgents
from pacs_megatron.rollout.step_agents import StepAgents
from pacs_megatron.rollout.step_results import StepResults
from pacs_megatron.rollout.step_rollouts import StepRollouts
from pacs_megatron.rollout.wire import Connection
from pacs_megatron.runtime.cores import bind_to_rollout_cores
from pacs_megatron.runtime.json_reader import parsing
from pacs_megatron.runtime.processes import die_with_parent, ignore_job_signals
from pacs_megatron.sglang.build import open_engine
from pacs_megatron.sglang.client import SglangEngine
from pacs_megatron.sglang.fleet import Health

# Not `__main__`, whose info lines are dropped.
logger = logging.getLogger("pacs_megatron.rollout.driver")
_RESTART_POLL_S = 0.5
_NUM_UNCOLLECTED = 200_000
"""Containers that Python allocates before it looks for cycles, instead of 700.

A response is parsed into a list for each token, and each look holds the GIL.
"""
_START_DELAY_S = 0.02
"""Delay of requests for later steps after a weight update.

They hold the GIL, but rank 0 needs a finished step first.
"""


class Driver:
    """The driver of one run. `serve` handles requests; `close` ends servers and reward workers."""

    def __init__(
        self, config: RunConfig, run_dir: Path, model_dir: Path, connection: Connection
    ) -> None:
        """Loads the data and starts reward workers and managed servers.

        Raises PacsError, after which the process ends.
        """
        self._config = config
        self._connection = connection
        self._tokenizer = load_tokenizer(str(model_dir), config.model.trust_remote_code)
        self._decoding = threading.Lock()
        self._stops = stop_token_ids(self._tokenizer, str(model_dir))
        self._prompts = RunPrompts(config, run_dir, model_dir, self._tokenizer)
        self._data = self._prompts.train
        self._benchmarks = self._prompts.benchmarks

        self._request: OpenRequest | None = None
        self._to_start: list[StepRollouts] = []
        """SGLang: rollouts that may be sampled, but whose samples are not requested yet"""
        self._start_at = 0.0
        self._failure: RolloutError | None = None
        """error of writing the samples' files; the next response reports it"""
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)

        self._judge: Judge | None = None
        if config.reward is not None:
            self._judge = Judge(config.reward, self._decode, truncated=config.admission.truncated)
        self._engine = self._open_engine(run_dir, model_dir)
        self._results = StepResults(config, run_dir, self._prompts, self._judge, self._decode)
        self._server_agents = self._open_server_agents()
        sampler = self._server_agents or self._engine
        self._buffer = RolloutBuffer(
            self._judge, sampler, self._data.take, self._wake, self._results.admits
        )
        self._agents = self._open_agents()

    def close(self) -> None:
        for part in (self._agents, self._server_agents, self._engine, self._judge):
            if part is not None:
                part.close()

    def serve(self) -> None:
        """Handles requests until `close`.

        A PacsError becomes an error response; any other exception ends the process.
        """
        self._send_ready()
        while True:
            wait_s = PROGRESS_INTERVAL_S if self._request else None
            if self._to_start:
                wait_s = max(0.0, self._start_at - time.monotonic())
            sources: list[Connection | socket.socket] = [self._connection, self._woken]
            ready, _, _ = select.select(sources, [], [], wait_s)

            if self._woken in ready:
                self._woken.recv(1 << 16)
            if self._connection in ready:
                header, arrays = self._connection.receive()
                if header["op"] == "close":
                    return
                self._handle(header, arrays)
            if self._request is not None:
                self._advance(self._request)
            self._do_later_work()

    # ----------------------------------------------------------------------------------------------
    # The requests. Each method returns its response, or opens the request.

    def rollout(self, number: int, step: int) -> None:
        """Opens the request for a step's admitted samples. All earlier steps are trained."""
        self._buffer.forget(step - 1)
        steps = self._dispatch(step)
        for_ranks: list[StepRollouts] = []
        if self._engine is None:
            # The ranks sample all allowed steps before they train, because the update replaces
            # these weights.
            for_ranks = [rollouts for rollouts in steps if rollouts.missing]
        else:
            self._buffer.start(steps[0])
            self._to_start = steps
            self._start_at = 0.0
        respond = partial(self._results.step, sent=self._buffer.sent)
        self._request = OpenRequest(
            number, steps[0], respond, for_ranks, self._refill, self._agents
        )

    def evaluate(self, number: int, step: int) -> None:
        """Opens the request for the counts of every benchmark's problems."""
        config = self._config
        prompts: list[Prompt] = []
        for benchmark in self._benchmarks:
            prompts += benchmark.prompts
        requests = evaluation_requests(
            config.evaluation, self._benchmarks, run_seed=config.run.seed, step=step
        )
        rollouts = StepRollouts(
            step=step, prompts=tuple(prompts), requests=tuple(requests), is_train=False
        )
        if self._engine is not None:
            self._buffer.start(rollouts, urgent=True)
        for_ranks = [rollouts] if self._engine is None else []
        respond = partial(self._results.evaluation, benchmarks=self._benchmarks)
        self._request = OpenRequest(number, rollouts, respond, for_ranks, agents=self._agents)

    def state(self, trained: int, *, final: bool) -> Message:
        """The position in the data and the rollouts of later steps, for a checkpoint after
        `trained` steps.

        `final` ends the reward workers first, because the run keeps no later verdict.
        """
        if final and self._judge is not None:
            self._judge.close()
        self._buffer.forget(trained)
        header, arrays = self._buffer.state()
        return {"kind": "state", "order": self._prompts.position(), "buffer": header}, arrays

    def load_state(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Message:
        """Inverse of `state`; the response has a line for each change since. Raises
        CheckpointError.
        """
        with parsing("the checkpoint's state.json (driver)", CheckpointError):
            changes = self._prompts.load_position(header["order"])
            has_other_reward = self._prompts.has_other_reward(header["order"])
        with parsing("the checkpoint's buffer.json", CheckpointError):
            buffer = header["buffer"]
            if buffer is not None:
                saved = (buffer, dict(arrays))
                self._buffer.load_state(
                    saved, self._data.by_id, self._data.requests, judge_again=has_other_reward
                )
        return {"kind": "loaded", "notices": changes}, {}

    def begin_update(self, *, is_release: bool) -> Message:
        """Pauses requests to the servers until `set_current`; returns the servers of the update,
        each with its trainer rank.

        `is_release`: the servers release their memory for the training step. Waits for a restarting
        server, because it would use memory during the step; no server restarts before the next
        update.

        Raises RolloutError if no server is alive for an update.
        """
        options = self._config.rollout.sglang
        assert self._engine is not None and options is not None
        self._engine.begin_update(is_release=is_release)
        deadline = time.monotonic() + options.all_down_after_s
        while True:
            status = self._engine.status()
            alive = [
                (server.url, server.trainer_rank)
                for server in status
                if server.health is not Health.DEAD
            ]
            if is_release:
                is_ready = not any(server.restarting for server in status)
            else:
                is_ready = bool(alive)
            if is_ready:
                return {"kind": "updating", "servers": alive}, {}

            can_return = any(server.returning for server in status)
            if not is_release and (time.monotonic() > deadline or not can_return):
                reasons = "; ".join(f"{server.url}: {server.reason}" for server in status)
                raise RolloutError(f"no rollout server is alive: {reasons}")
            time.sleep(_RESTART_POLL_S)

    def servers(self) -> Message:
        """The servers that are not DEAD."""
        assert self._engine is not None
        status = self._engine.status()
        urls = [server.url for server in status if server.health is not Health.DEAD]
        return {"kind": "servers", "urls": urls}, {}

    def set_current(self, version: int, digest: str, trained: int) -> Message:
        """Records that the rollout engine has the weights after `trained` steps; starts SGLang on
        all allowed steps.
        """
        self._buffer.sent.add(digest, trained)
        self._buffer.forget(trained)
        if self._engine is not None:
            self._engine.set_current(version, digest)
            if self._config.rollout.steps_ahead:
                self._to_start = self._dispatch(trained + 1)
                self._start_at = time.monotonic() + _START_DELAY_S
        return {"kind": "current"}, {}

    # ----------------------------------------------------------------------------------------------

    def _send_ready(self) -> None:
        message = {
            "kind": "ready",
            "request": 0,
            "num_prompts": len(self._data.prompts),
            "notices": self._prompts.notices,
            "stop_token_ids": self._stops,
        }
        self._connection.send(message)

    def _open_engine(self, run_dir: Path, model_dir: Path) -> SglangEngine | None:
        """SGLang's client, with the managed servers started; None for other engines."""
        config = self._config
        if config.rollout.sglang is None:
            return None
        if config.rollout.starts_servers_on_trainer_gpus:
            # Servers start after the ranks have built and off-loaded the model: a server measures
            # the free memory.
            header, _ = self._connection.receive()
            if header["op"] != "start_servers":
                raise RolloutError("the trainer ended before the servers started")
        model = config.model.model_copy(update={"path": str(model_dir)})
        return open_engine(
            config.rollout.sglang,
            model,
            run_dir / "servers",
            config.policy.routing,
            stops=self._stops,
        )

    def _open_agents(self) -> StepAgents | None:
        """The agents of the embedded engine; None if a response is one turn."""
        options = self._config.rollout.agents
        if options is None or self._engine is not None:
            return None
        encoder = build_encoder(options, self._config.data, self._tokenizer, self._prompts.now)
        rounds = AgentRounds(options, encoder, self._stops, self._decode, self._wake)
        return StepAgents(rounds, self._buffer.arrived)

    def _open_server_agents(self) -> ServerAgents | None:
        """The agents of SGLang; None if a response is one turn."""
        options = self._config.rollout.agents
        if options is None or self._engine is None:
            return None
        encoder = build_encoder(options, self._config.data, self._tokenizer, self._prompts.now)
        of_benchmarks: dict[str, Prompt] = {}
        for benchmark in self._benchmarks:
            of_benchmarks |= {prompt.id: prompt for prompt in benchmark.prompts}
        by_id = self._data.by_id

        def prompt_of(request: SampleRequest) -> Prompt:
            prompts = by_id if request.is_for_training else of_benchmarks
            return prompts[request.prompt_id]

        return ServerAgents(self._engine, options, encoder, self._stops, self._decode, prompt_of)

    def _dispatch(self, step: int) -> list[StepRollouts]:
        """Dispatches `step` and the later steps that may be sampled with the same weights; returns
        their rollouts.
        """
        last = min(step + self._config.rollout.steps_ahead, self._config.run.steps)
        return self._buffer.dispatch(step, last)

    def _refill(self, rollouts: StepRollouts) -> list[StepRollouts] | None:
        """Adds further samples, then prompts, to a judged step; see `OpenRequest`."""
        if rollouts.cancelled or rollouts.is_returned:
            return None
        if not (self._add_samples(rollouts) or self._add_prompts(rollouts)):
            return None
        if self._engine is None:
            return [rollouts]
        self._buffer.start(rollouts)
        return []

    def _add_samples(self, rollouts: StepRollouts) -> bool:
        """Adds further samples of difficult prompts (`admission.resample`); whether there are some.

        A prompt gets them once.
        """
        options = self._config.admission.resample
        if options is None:
            return False

        extra = {}
        for prompt in rollouts.prompts:
            group = None
            if prompt.id not in rollouts.extra:
                group = rollouts.whole_group(prompt.id)
            if group is not None:
                accuracy = accuracy_of(group.samples)
                num_samples = self._config.batch.samples_per_prompt
                extra[prompt.id] = 0
                if accuracy is not None:
                    extra[prompt.id] = num_extra_samples(accuracy, num_samples, options)

        known = {request.id for request in rollouts.requests}
        prompts = [prompt for prompt in rollouts.prompts if extra.get(prompt.id)]
        requests = self._data.requests(prompts, rollouts.step, extra)
        requests = [request for request in requests if request.id not in known]
        rollouts.extend_groups(extra, requests)
        if requests:
            logger.info(
                "step %d: %d further samples of %d difficult prompts",
                rollouts.step,
                len(requests),
                len(prompts),
            )
        return bool(requests)

    def _add_prompts(self, rollouts: StepRollouts) -> bool:
        """Adds prompts to a step with too few admitted groups; whether there are some."""
        limit = self._config.admission.refill_rounds
        if not limit:
            return False
        num_required = self._config.batch.prompts_per_step
        num_admitted = sum(self._results.admits(group) for group in rollouts.groups())
        if num_admitted >= num_required:
            return False

        prompts: tuple[Prompt, ...] = ()
        if rollouts.refills < limit:
            prompts = self._data.refill(rollouts, num_required - num_admitted)
        shortfall = f"step {rollouts.step}: {num_admitted} of {num_required} groups are admitted"
        if not prompts:
            reason = "the data has no other prompts"
            if rollouts.refills >= limit:
                reason = f"after admission.refill_rounds={limit}"
            logger.warning("%s; it trains on them: %s", shortfall, reason)
            return False

        rollouts.extend(prompts, self._data.requests(prompts, rollouts.step))
        logger.info(
            "%s; refill %d of at most %d: %d more prompts",
            shortfall,
            rollouts.refills,
            limit,
            len(prompts),
        )
        return True

    def _abandon(self) -> None:
        """Closes the request without a response.

        Steps keep their finished samples; an evaluation restarts later.
        """
        request = self._request
        self._request = None
        if self._agents is not None:
            self._agents.abandon()
        if self._engine is not None and request is not None and not request.rollouts.is_train:
            sampler = self._server_agents or self._engine
            sampler.cancel([missing.id for missing in request.rollouts.missing])

    def _do_later_work(self) -> None:
        """Does the work that follows a response: requests samples of later steps and writes the
        samples' files.
        """
        if time.monotonic() >= self._start_at:
            for rollouts in self._to_start:
                self._buffer.start(rollouts)
            self._to_start = []
        try:
            self._results.write_pending()
        except OSError as error:  # reported with the next request
            self._failure = RolloutError(
                f"{error.filename}: {error.strerror}; free some space, then resume"
            )

    def _handle(self, request: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        number = request["request"]
        match request["op"]:
            case "abandon":
                self._abandon()
            case "samples":
                if self._request is not None and self._request.number == number:
                    rollouts = self._request.take_in_ranks()
                    samples = samples_from_message(request, arrays)
                    if self._agents is not None:
                        self._agents.deliver(samples)
                    else:
                        self._send(number, lambda: self._buffer.arrived(rollouts, samples))
            case "rollout":
                self._send(number, lambda: self.rollout(number, request["step"]))
            case "evaluate":
                self._send(number, lambda: self.evaluate(number, request["step"]))
            case "state":
                self._send(number, lambda: self.state(request["trained"], final=request["final"]))
            case "load_state":
                self._send(number, lambda: self.load_state(request, arrays))
            case "begin_update":
                self._send(number, lambda: self.begin_update(is_release=request["is_release"]))
            case "servers":
                self._send(number, self.servers)
            case "set_current":
                self._send(
                    number,
                    lambda: self.set_current(
                        request["version"], request["digest"], request["trained"]
                    ),
                )

    def _advance(self, request: OpenRequest) -> None:
        """Sends the next message of the open request to rank 0: requests to sample, its response,
        or progress.
        """
        self._send(request.number, request.advance)
        if request.is_closed:
            self._request = None
            return
        # An error response has closed the request.
        if self._request is None or self._engine is None:
            return
        if self._engine.needs_weights():
            logger.warning(
                "no rollout server has the current weights; "
                "requesting them from the trainer once more"
            )
            self._abandon()
            self._connection.send({"kind": "stale", "request": request.number})

    def _send(self, number: int, compute: Callable[[], Reply | None]) -> None:
        """Sends the message that `compute` returns, or its error, which closes the open request."""
        failure = self._failure
        self._failure = None
        try:
            if failure is not None:
                raise failure
            message = compute()
        except PacsError as error:
            logger.exception("error response to the trainer")
            self._request = None
            self._connection.send(_error_message(number, error))
            return
        if message is not None:
            header, arrays = message
            self._connection.send({**header, "request": number}, arrays)

    def _wake(self) -> None:
        """Wakes the main thread; called from any thread."""
        # With a full buffer the main thread wakes up anyway.
        with suppress(BlockingIOError):
            self._waker.send(b"\0")

    def _decode(self, ids: np.ndarray) -> str:
        """The text of response ids; called from any thread."""
        # An array: the elements of a list would be checked one by one.
        with self._decoding:
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _error_message(number: int, error: PacsError) -> dict[str, Any]:
    return {"kind": "error", "request": number, "type": type(error).__name__, "message": str(error)}


def _end_with_thread(args: threading.ExceptHookArgs) -> None:
    """Ends the driver after a bug in a thread, because the main thread would never stop waiting for
    it.
    """
    logger.critical("thread %s died", args.thread, exc_info=args.exc_value)
    logging.shutdown()
    os._exit(int(ExitCode.FAILED))


def main(arguments: Sequence[str]) -> int:
    """`python -m pacs_megatron.rollout.driver <run folder> <model folder> <socket fd>`, which rank
    0 starts.
    """
    die_with_parent()
    ignore_job_signals()
    bind_to_rollout_cores()
    run_dir = Path(arguments[0])
    model_dir = Path(arguments[1])
    descriptor = int(arguments[2])
    setup_logging(None, 0)
    threading.excepthook = _end_with_thread

    connection = Connection(socket.socket(fileno=descriptor), "trainer")
    config = load_config(run_dir / "config.yaml").config
    try:
        driver = Driver(config, run_dir, model_dir, connection)
    except PacsError as error:
        connection.send(_error_message(0, error))
        return int(error.exit_code)

    # Freezes the half a million objects of the imports: to scan them holds the GIL for 0.2 s and
    # more.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_UNCOLLECTED)
    try:
        driver.serve()
    finally:
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
