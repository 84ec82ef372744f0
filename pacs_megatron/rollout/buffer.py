"""The rollout buffer: it dispatches steps, adds their samples and verdicts, and keeps them until
they are trained.

Concurrency:
    main thread   of the driver; dispatches steps and reads their state
    `_stream`     with SGLang, one thread per step; takes samples from the engine's stream
    `_receive`    in threads of the judge, which deliver verdicts

All threads change a step under one lock. The last verdict of a step, an error and the end of a
stream call `wake`, which notifies the main thread. Each sample is stored once: after its arrival
its id is in `sampled`, and such ids are not requested again.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from pacs_megatron.contracts import Group, Prompt, Sample, SampleRequest
from pacs_megatron.errors import PacsError, RewardError
from pacs_megatron.rollout.judging import Judge
from pacs_megatron.rollout.sample_arrays import Message
from pacs_megatron.rollout.server_agents import ServerAgents
from pacs_megatron.rollout.step_rollouts import (
    SentWeights,
    StepRollouts,
    is_agent_failure,
    rollouts_from_message,
    rollouts_to_message,
)
from pacs_megatron.sglang.client import SglangEngine

logger = logging.getLogger(__name__)


class RolloutBuffer:
    """The steps in progress, by number."""

    def __init__(
        self,
        judge: Judge | None,
        engine: SglangEngine | ServerAgents | None,
        make_rollouts: Callable[[int], StepRollouts],
        wake: Callable[[], None],
        admits: Callable[[Group], bool] = lambda _group: True,
    ) -> None:
        """Starts no thread.

        Args:
            judge: judges samples; None for demonstrations.
            engine: SGLang's client, with agents around it; None if the ranks sample.
            make_rollouts: takes a step's prompts from the data; called in the order of the steps.
            wake: notifies the main thread; called from any thread.
            admits: whether a complete group will be trained; called from any thread. A step with
                over-sampling ends as soon as enough groups are admitted.
        """
        self._judge = judge
        self._engine = engine
        self._make_rollouts = make_rollouts
        self._wake = wake
        self._admits = admits
        self._lock = threading.Lock()
        self._steps: dict[int, StepRollouts] = {}
        self.sent = SentWeights()

    def dispatch(self, first: int, last: int) -> list[StepRollouts]:
        """The rollouts of steps `first` to `last`; creates missing ones.

        `start` requests their samples.
        """
        for step in range(first, last + 1):
            if step not in self._steps:
                self._steps[step] = self._make_rollouts(step)
        return [self._steps[step] for step in range(first, last + 1)]

    def forget(self, trained: int) -> None:
        """Removes the first `trained` steps."""
        self._steps = {step: rollouts for step, rollouts in self._steps.items() if step > trained}

    def start(self, rollouts: StepRollouts, *, urgent: bool = False) -> None:
        """SGLang: requests the missing samples, once.

        `urgent` requests go before all queued ones.
        """
        assert self._engine is not None
        missing = [] if rollouts.started else rollouts.missing
        rollouts.started = True
        if missing:
            thread = threading.Thread(
                target=self._stream,
                args=(rollouts, missing, urgent),
                name=f"rollout-{rollouts.step}",
                daemon=True,
            )
            thread.start()

    def arrived(self, rollouts: StepRollouts, samples: Iterable[Sample]) -> None:
        """Adds samples and submits them to the judge, except those whose agent failed.

        Raises RolloutError for a sample from weights that were never sent.
        """
        for sample in samples:
            self.sent.check(sample)
            with self._lock:
                if sample.id in rollouts.sampled or sample.id in rollouts.cancelled:
                    continue
                rollouts.sampled[sample.id] = sample
            self._submit(rollouts, sample)

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Every step with all of its samples, for a checkpoint."""
        with self._lock:
            steps = [self._steps[step] for step in sorted(self._steps)]
            header, arrays = rollouts_to_message(steps)
            samples: list[Sample] = []
            for rollouts in steps:
                samples += rollouts.sampled.values()
            header["sent"] = self.sent.state_dict(samples)
        return header, arrays

    def load_state(
        self,
        saved: Message,
        prompts: Mapping[str, Prompt],
        requests_of: Callable[[Sequence[Prompt], int, Mapping[str, int]], Sequence[SampleRequest]],
        *,
        judge_again: bool = False,
    ) -> None:
        """Loads saved steps and submits their samples without a verdict to the judge.

        Args:
            saved: the result of `state`.
            prompts: the data's prompts by id.
            requests_of: returns the requests of a step's prompts, with further samples by prompt
                id.
            judge_again: drops the verdicts of steps whose samples no rank has received, so that one
                reward judges a step.
        """
        header, arrays = saved
        self.sent.load_state_dict(header["sent"])
        for rollouts in rollouts_from_message(header, arrays, prompts, requests_of):
            self._steps[rollouts.step] = rollouts
            if judge_again and self._judge is not None and not rollouts.is_returned:
                rollouts.drop_verdicts()
            if self._engine is not None and not rollouts.cancelled:
                rollouts.num_admitted = sum(self._admits(group) for group in rollouts.groups())
            # A list, because the judge's threads change `sampled` at once.
            unjudged = [
                sample for sample in rollouts.sampled.values() if sample.id not in rollouts.judged
            ]
            for sample in unjudged:
                self._submit(rollouts, sample)
            logger.info(
                "step %d: %d of %d samples are in the checkpoint",
                rollouts.step,
                len(rollouts.sampled),
                len(rollouts.requests),
            )

    def _stream(
        self, rollouts: StepRollouts, requests: Sequence[SampleRequest], urgent: bool
    ) -> None:
        """Requests samples until all have arrived; the body of a step's thread."""
        assert self._engine is not None
        try:
            with closing(self._engine.stream(requests, urgent=urgent)) as samples:
                for sample in samples:
                    self.arrived(rollouts, [sample])
        except PacsError as error:
            self._fail(rollouts, error)
        self._wake()

    def _submit(self, rollouts: StepRollouts, sample: Sample) -> None:
        if is_agent_failure(sample):  # there is nothing to judge
            self._receive(rollouts, sample)
            return
        assert self._judge is not None
        prompt = rollouts.by_id[sample.prompt_id]
        self._judge.submit(sample, prompt, partial(self._receive, rollouts))

    def _receive(self, rollouts: StepRollouts, verdict: Sample | RewardError) -> None:
        """Stores a verdict; called in a thread of the judge."""
        if isinstance(verdict, RewardError):
            self._fail(rollouts, verdict)
            return
        with self._lock:
            surplus = self._store(rollouts, verdict)
        # Without the lock, because `cancel` waits for the client's thread.
        if surplus and self._engine is not None:
            self._engine.cancel(surplus)
        # A wake-up for each verdict would slow this thread down.
        if len(rollouts.judged) >= rollouts.num_required:
            self._wake()

    def _store(self, rollouts: StepRollouts, sample: Sample) -> list[str]:
        """Stores a judged sample.

        Returns the ids of requests in flight that over-sampling no longer needs.
        """
        if sample.id in rollouts.cancelled:
            return []
        rollouts.sampled[sample.id] = sample
        rollouts.judged.add(sample.id)

        # The embedded engine samples all requests at once, so there is nothing to cancel. Further
        # samples belong to admitted groups.
        if rollouts.enough is None or self._engine is None or rollouts.extra:
            return []
        group = rollouts.whole_group(sample.prompt_id)
        if group is not None and self._admits(group):
            rollouts.num_admitted += 1
        if rollouts.num_admitted < rollouts.enough or rollouts.cancelled:
            return []
        return rollouts.cancel_rest()

    def _fail(self, rollouts: StepRollouts, error: PacsError) -> None:
        with self._lock:
            rollouts.error = rollouts.error or error
        self._wake()
