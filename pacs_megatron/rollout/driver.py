"""The driver: one process beside global rank 0, with its own GIL. It owns prompt order, requests, rewards and admission.

Concurrency: rank 0 asks one question at a time over a socket; every answer bears the question's number. The main thread
waits for the socket and for the pipeline's threads (`select`), so a question that takes long, `rollout` or `evaluate`,
leaves it free: it tells how far sampling is, and takes `abandon` and `state` at any time. For the embedded engine the
driver asks back (`generate`) in between. It ends when the socket closes, and the kernel ends it when rank 0 dies.
It ignores SIGINT, SIGTERM and SIGUSR1: rank 0 turns signals into decisions and then closes the socket.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.batching.tables import facts_to_arrays, tabulate, tokens_to_arrays
from pacs_megatron.config import load_config
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts import Group, Sample, Stop
from pacs_megatron.data import load_prompts, load_tokenizer
from pacs_megatron.errors import ExitCode, PacsError, RolloutError
from pacs_megatron.observability.logs import setup_logging
from pacs_megatron.observability.rollout_log import RECORD_SUFFIX, rollout_path, write_rollouts
from pacs_megatron.rewards.pool import RewardPool
from pacs_megatron.rollout.admission import admit, shuffle_labels
from pacs_megatron.rollout.buffer import RolloutBuffer
from pacs_megatron.rollout.judge import Judge
from pacs_megatron.rollout.record import write_record
from pacs_megatron.rollout.requests import sample_requests
from pacs_megatron.rollout.sample_arrays import Message, requests_to_message, samples_from_message
from pacs_megatron.rollout.staleness import staleness_metrics
from pacs_megatron.rollout.step_rollouts import StepRollouts, rollout_metrics
from pacs_megatron.rollout.train_data import TrainData
from pacs_megatron.rollout.wire import Connection
from pacs_megatron.runtime.processes import die_with_parent, ignore_job_signals
from pacs_megatron.sglang.build import open_engine
from pacs_megatron.sglang.client import SglangEngine
from pacs_megatron.sglang.fleet import Health

logger = logging.getLogger("pacs_megatron.rollout.driver")  # not `__main__`, whose lines below a warning are not kept
_PROGRESS_S = 1.0
_RESTART_POLL_S = 0.5
_ANSWER_FIRST_S = 0.02
"""How long requests for later steps wait for rank 0's next question: sending hundreds of them holds the GIL, and rank 0
asks for a step that is ready right after a weight update. Seconds."""


@dataclass(slots=True, kw_only=True)
class _Open:
    """The question that rank 0 waits for."""

    number: int
    rollouts: StepRollouts
    """answered when this is done"""
    finish: Callable[[], Message]
    to_generate: list[StepRollouts]
    """embedded engine: works that the ranks have yet to sample, the next one first"""
    generating: bool = False
    told: tuple[int, int] = (0, 0)
    """counts that rank 0 heard of last"""
    told_at: float = 0.0


class Driver:
    """Answers rank 0's questions."""

    def __init__(self, config: RunConfig, run_dir: Path, model_dir: Path, connection: Connection) -> None:
        self._config = config
        self._run_dir = run_dir
        self._connection = connection
        self._tokenizer = load_tokenizer(str(model_dir), config.model.trust_remote_code)
        self._decoding = threading.Lock()
        self._data = TrainData(config, model_dir, self._tokenizer)
        self._benchmarks = [load_prompts(b, config.data, self._tokenizer) for b in config.evaluation.benchmarks]
        rollout = config.rollout
        self._max_staleness = rollout.steps_ahead
        self._open: _Open | None = None
        self._to_start: list[StepRollouts] = []
        """SGLang: works that may be sampled and were not asked for yet"""
        self._start_at = 0.0
        """monotonic time from which on `_to_start` waits no longer"""
        self._to_write: Callable[[], None] | None = None
        """what is to be written once the answer is out"""
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._engine: SglangEngine | None = None
        self._judge: Judge | None = None
        self._pool: RewardPool | None = None
        if config.reward is not None:
            self._pool = RewardPool(config.reward)
            self._judge = Judge(
                self._pool,
                self._decode,
                threshold=config.reward.label_threshold,
                max_failure_frac=config.reward.max_failure_frac,
            )
        if rollout.sglang is not None:
            model = config.model.model_copy(update={"path": str(model_dir)})
            self._engine = open_engine(rollout.sglang, model, run_dir / "servers")
        self._buffer = RolloutBuffer(self._judge, self._engine, self._data.take, self._wake, self._admits)

    def close(self) -> None:
        """End workers and own servers."""
        if self._engine is not None:
            self._engine.close()
        if self._pool is not None:
            self._pool.close()

    def _decode(self, ids: np.ndarray) -> str:
        with self._decoding:
            return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    # ------------------------------------------------------------------------------------------------------- weights
    def begin_update(self) -> Message:
        """Stops requests until `set_current`; returns the servers of the update and the trainer rank of each."""
        rollout = self._config.rollout.sglang
        assert self._engine is not None and rollout is not None
        self._engine.begin_update()
        deadline = time.monotonic() + rollout.all_down_after_s
        while True:
            status = self._engine.status()
            alive = [(server.url, server.trainer_rank) for server in status if server.health is not Health.DEAD]
            if alive:
                return {"kind": "updating", "servers": alive}, {}
            if time.monotonic() > deadline or not any(server.returning for server in status):
                raise RolloutError("no rollout server is alive: " + "; ".join(f"{s.url}: {s.reason}" for s in status))
            time.sleep(_RESTART_POLL_S)

    def set_current(self, version: int, digest: str, trained: int) -> Message:
        """The rollout engine holds the weights after `trained` steps. Servers go on with the steps that may now be
        sampled (in a moment, see `_ANSWER_FIRST_S`), while rank 0 evaluates, saves or trains."""
        self._buffer.sent.add(digest, trained)
        self._buffer.forget(trained)
        if self._engine is not None:
            self._engine.set_current(version, digest)
            if self._max_staleness:
                self._to_start = self._dispatch(trained + 1)
                self._start_at = time.monotonic() + _ANSWER_FIRST_S
        return {"kind": "current"}, {}

    def _dispatch(self, step: int) -> list[StepRollouts]:
        """The works of `step` and of those that may be sampled together with it."""
        return self._buffer.dispatch(step, min(step + self._max_staleness, self._config.run.steps))

    # --------------------------------------------------------------------------------------------------------- steps
    def rollout(self, number: int, step: int) -> None:
        """Opens the question for a step's admitted samples; the steps before it are trained."""
        self._buffer.forget(step - 1)
        steps = self._dispatch(step)
        to_generate: list[StepRollouts] = []
        if self._engine is not None:
            self._buffer.start(steps[0])
            self._to_start, self._start_at = steps, 0.0
        else:
            # Ranks sample what the lag allows before they train: afterwards these weights are gone.
            to_generate = [w for w in steps if self._buffer.missing(w)]
        self._open = _Open(
            number=number, rollouts=steps[0], finish=partial(self._step_message, steps[0]), to_generate=to_generate
        )

    def _step_message(self, rollouts: StepRollouts) -> Message:
        """The judged and admitted samples of a step. Raises RewardError when too many could not be judged."""
        config, step = self._config, rollouts.step
        judged = rollouts.in_order()
        is_sampled = config.rollout.is_sampled
        if self._judge is not None and is_sampled:
            self._judge.check(judged)
        if not rollouts.is_returned:
            self._data.put_back(rollouts.unfinished)
            rollouts.is_returned = True
        staleness = {s.id: self._buffer.sent.staleness(s, step) for s in judged} if is_sampled else {}
        stale = {sample_id for sample_id, staleness in staleness.items() if staleness > self._max_staleness}
        admitted = admit(
            rollouts.groups(),
            config.admission,
            min_group_size=self._min_group_size,
            # Synchronous training has none but where an earlier attempt was ahead, and says nothing of them otherwise.
            stale=stale if stale or self._max_staleness else None,
        )
        kept = admitted.groups[: rollouts.enough]
        if rollouts.enough is not None:
            admitted.counts["surplus_groups"] = len(admitted.groups) - len(kept) + len(rollouts.unfinished)
        if config.data.shuffle_labels:
            kept = shuffle_labels(kept, seed=config.run.seed, step=step)
        if is_sampled:
            # Decoding thousands of long answers takes a while, and rank 0 can train meanwhile. Its next question waits
            # for it, so that the samples are on disk before the row of their step.
            self._to_write = partial(self._write, rollouts, judged)
        facts, tokens = tabulate(kept)
        arrays = {f"facts.{name}": value for name, value in facts_to_arrays(facts).items()}
        arrays |= {f"tokens.{name}": value for name, value in tokens_to_arrays(tokens).items()}
        metrics = rollout_metrics(judged, admitted.counts) | {"data/epoch": float(rollouts.epoch)}
        if self._max_staleness:
            trained = [sample for group in kept for sample in group.samples]
            metrics |= staleness_metrics(trained, [staleness[sample.id] for sample in trained])
        logger.info("step %d: %d samples in %.2f s", step, len(judged), time.perf_counter() - rollouts.since)
        return {"kind": "groups", "metrics": metrics}, arrays

    @property
    def _min_group_size(self) -> int:
        return 1 if self._config.objective.name == "sft" else 2

    def _admits(self, group: Group) -> bool:
        """Whether a judged group will be trained, its age aside."""
        return bool(admit([group], self._config.admission, min_group_size=self._min_group_size).groups)

    def evaluate(self, number: int, step: int) -> None:
        """Opens the question for the counts of every benchmark's problems."""
        config = self._config
        assert config.evaluation.sampling is not None
        prompts = tuple(prompt for benchmark in self._benchmarks for prompt in benchmark.prompts)
        requests = sample_requests(
            prompts,
            config.evaluation.samples_per_prompt,
            config.evaluation.sampling,
            run_seed=config.run.seed,
            step=step,
            purpose="eval",
        )
        rollouts = StepRollouts(step=step, prompts=prompts, requests=tuple(requests), is_train=False)
        if self._engine is not None:
            self._buffer.start(rollouts, urgent=True)
        self._open = _Open(
            number=number,
            rollouts=rollouts,
            finish=partial(self._evaluation_message, rollouts),
            to_generate=[rollouts] if self._engine is None else [],
        )

    def _evaluation_message(self, rollouts: StepRollouts) -> Message:
        judged = rollouts.in_order()
        assert self._judge is not None
        self._judge.check(judged)
        self._write(rollouts, judged)
        per_prompt: dict[str, list[Sample]] = {prompt.id: [] for prompt in rollouts.prompts}
        for sample in judged:
            per_prompt[sample.prompt_id].append(sample)
        return {
            "kind": "evaluation",
            "benchmarks": {
                benchmark.name: [_counts(prompt.id, per_prompt[prompt.id]) for prompt in benchmark.prompts]
                for benchmark in self._benchmarks
            },
        }, {}

    def _write(self, rollouts: StepRollouts, samples: list[Sample]) -> None:
        """What the run keeps of these samples, as text and as arrays."""
        path = rollout_path(self._run_dir, rollouts.step, "step" if rollouts.is_train else "eval")
        if self._config.logging.save_rollouts:
            write_rollouts(path, samples, rollouts.by_id, self._decode)
        if self._config.logging.save_tokens:
            write_record(path.with_suffix(RECORD_SUFFIX), samples)

    def _abandon(self) -> None:
        """Rank 0 does not wait any more. Finished samples of steps stay; an evaluation is made anew."""
        if self._open is not None and not self._open.rollouts.is_train:
            self._buffer.drop(self._open.rollouts)
        self._open = None

    # --------------------------------------------------------------------------------------------------------- state
    def state(self, trained: int, *, final: bool) -> Message:
        """The position in the data and the rollouts of later steps, for a checkpoint after `trained` steps.

        `final` ends the reward workers first. The run does not keep later verdicts, so they would be computed twice.
        """
        if final and self._judge is not None:
            self._judge.close()
        self._buffer.forget(trained)
        header, arrays = self._buffer.state()
        return {"kind": "state", "order": self._data.order.state_dict(), "buffer": header}, arrays

    def load_state(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Message:
        """Continue where a checkpoint was taken."""
        self._data.order.load_state_dict(header["order"])
        if header["buffer"] is not None:
            self._buffer.load_state((header["buffer"], dict(arrays)), self._data.by_id, self._data.requests)
        return {"kind": "loaded"}, {}

    # --------------------------------------------------------------------------------------------------------- serve
    def serve(self) -> None:
        """Answer until rank 0 says `close`. A PacsError becomes an answer; anything else ends the process."""
        self._connection.send({"kind": "ready", "ask": 0, "num_prompts": len(self._data.prompts)})
        while True:
            sources: list[Connection | socket.socket] = [self._connection, self._woken]
            ready, _, _ = select.select(sources, [], [], self._patience_s())
            if self._woken in ready:
                self._woken.recv(1 << 16)
            if self._connection in ready:
                header, arrays = self._connection.receive()
                if header["op"] == "close":
                    return
                self._handle(header, arrays)
            if self._open is not None:
                self._advance(self._open)
            self._catch_up()

    def _patience_s(self) -> float | None:
        """How long to wait for rank 0 and the threads; None: for ever."""
        if self._to_start:
            return max(0.0, self._start_at - time.monotonic())
        return _PROGRESS_S if self._open else None

    def _catch_up(self) -> None:
        """What had to wait for an answer that was on its way."""
        if time.monotonic() >= self._start_at:
            for rollouts in self._to_start:
                self._buffer.start(rollouts)
            self._to_start = []
        if self._to_write is not None:
            self._to_write()
            self._to_write = None

    def _handle(self, question: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        number = question["ask"]
        match question["op"]:
            case "abandon":
                self._abandon()
            case "samples":
                if self._open is not None and self._open.number == number:
                    self._generated(self._open, samples_from_message(question, arrays))
            case "rollout":
                self._or_error(number, partial(self.rollout, number, question["step"]))
            case "evaluate":
                self._or_error(number, partial(self.evaluate, number, question["step"]))
            case "state":
                self._answer(number, partial(self.state, question["trained"], final=question["final"]))
            case "load_state":
                self._answer(number, partial(self.load_state, question, arrays))
            case "begin_update":
                self._answer(number, self.begin_update)
            case "set_current":
                version, digest, trained = question["version"], question["digest"], question["trained"]
                self._answer(number, partial(self.set_current, version, digest, trained))

    def _generated(self, question: _Open, samples: list[Sample]) -> None:
        """Embedded engine: what the ranks sampled for the first of `to_generate`."""
        question.generating = False
        rollouts = question.to_generate.pop(0)
        self._or_error(question.number, partial(self._buffer.arrived, rollouts, samples))

    def _advance(self, question: _Open) -> None:
        """Whatever the open question needs next: another share from the ranks, its answer, or a sign of life."""
        if not question.generating and question.to_generate:
            rollouts = question.to_generate[0]
            header, arrays = requests_to_message(rollouts.prompts, self._buffer.missing(rollouts))
            question.generating = True
            self._connection.send({"kind": "generate", "ask": question.number, "step": rollouts.step, **header}, arrays)
            return
        try:
            is_done = not question.generating and self._buffer.is_done(question.rollouts)
        except PacsError as error:
            self._tell(question.number, error)
            return
        if is_done:
            self._open = None
            self._answer(question.number, question.finish)
        elif self._engine is not None and self._engine.needs_weights():
            logger.warning("no rollout server holds the current weights; asking the trainer to send them once more")
            self._abandon()
            self._connection.send({"kind": "stale", "ask": question.number})
        elif time.monotonic() - question.told_at >= _PROGRESS_S:
            counts = self._buffer.counts(question.rollouts)
            if counts != question.told:
                question.told, question.told_at = counts, time.monotonic()
                done, total = counts
                self._connection.send({"kind": "progress", "ask": question.number, "done": done, "total": total})

    def _answer(self, number: int, compute: Callable[[], Message]) -> None:
        try:
            header, arrays = compute()
        except PacsError as error:
            self._tell(number, error)
            return
        self._connection.send({**header, "ask": number}, arrays)

    def _or_error(self, number: int, action: Callable[[], None]) -> None:
        try:
            action()
        except PacsError as error:
            self._tell(number, error)

    def _tell(self, number: int, error: PacsError) -> None:
        """The question ends with this error."""
        logger.error("told to the trainer", exc_info=error)
        self._open = None
        self._connection.send({"kind": "error", "ask": number, "type": type(error).__name__, "message": str(error)})

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it has enough to wake up by
            self._waker.send(b"\0")


def _counts(prompt_id: str, samples: Sequence[Sample]) -> dict[str, Any]:
    judged = [s for s in samples if s.failure is None]
    return {
        "id": prompt_id,
        "samples": len(judged),
        "correct": sum(s.label == 1 for s in judged),
        "unjudged": len(samples) - len(judged),
        "truncated": sum(s.stop is Stop.LENGTH for s in samples),
        "tokens": sum(s.response_len for s in samples),
    }


def _end_with_thread(args: threading.ExceptHookArgs) -> None:
    """A bug in a thread ends the driver: whoever waits for that thread would wait for ever."""
    logger.critical("thread %s died", args.thread, exc_info=args.exc_value)
    logging.shutdown()
    os._exit(int(ExitCode.FAILED))


def main(arguments: Sequence[str]) -> int:
    """`python -m pacs_megatron.rollout.driver <run folder> <model folder> <socket fd>`: started by rank 0 only."""
    die_with_parent()
    ignore_job_signals()
    run_dir, model_dir, fd = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    setup_logging(None, 0)
    threading.excepthook = _end_with_thread
    connection = Connection(socket.socket(fileno=fd), "trainer")
    config = load_config(run_dir / "config.yaml").config
    try:
        driver = Driver(config, run_dir, model_dir, connection)
    except PacsError as error:
        connection.send({"kind": "error", "ask": 0, "type": type(error).__name__, "message": str(error)})
        return int(error.exit_code)
    # What is loaded by now stays: half a million objects, and looking through them holds the GIL for 0.2 s and more,
    # during which no request goes out and no answer is taken.
    gc.collect()
    gc.freeze()
    try:
        driver.serve()
    finally:
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
