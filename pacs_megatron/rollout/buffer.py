"""Steps on their way: dispatched, sampled, judged, and kept until they were trained.

Concurrency: the driver's main thread dispatches and asks. With SGLang one thread a work takes its samples from the
engine's stream; the judge's thread brings verdicts. All of them change works under one lock, and `wake` tells the main
thread. A sample counts once: its id is in `sampled` from its arrival on, and ids that are there are not asked for again.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from pacs_megatron.contracts import Group, Prompt, Sample, SampleRequest
from pacs_megatron.errors import PacsError, RewardError
from pacs_megatron.rollout.judge import Judge
from pacs_megatron.rollout.sample_arrays import Message
from pacs_megatron.rollout.staleness import SentWeights
from pacs_megatron.rollout.step_rollouts import StepRollouts, rollouts_from_message, rollouts_to_message
from pacs_megatron.sglang.client import SglangEngine

logger = logging.getLogger(__name__)


class RolloutBuffer:
    """The works of a run; `dispatch` of the step after the last dispatched one makes the next."""

    def __init__(
        self,
        judge: Judge | None,
        engine: SglangEngine | None,
        make_rollouts: Callable[[int], StepRollouts],
        wake: Callable[[], None],
        admits: Callable[[Group], bool] = lambda _group: True,
    ) -> None:
        """`make_work(step)` takes the step's prompts from the data; `wake` and `admits` may be called from any thread.
        `admits` says whether a whole group will be trained, for works that need not have all of theirs."""
        self._admits = admits
        self._judge = judge
        self._engine = engine
        self._make_rollouts = make_rollouts
        self._wake = wake
        self._lock = threading.Lock()
        self._steps: dict[int, StepRollouts] = {}
        self.sent = SentWeights()

    # ------------------------------------------------------------------------------------------------------- the works
    def dispatch(self, first: int, last: int) -> list[StepRollouts]:
        """The works of steps `first` to `last`, made where they are not there; `start` has them sampled."""
        for step in range(first, last + 1):
            if step not in self._steps:
                self._steps[step] = self._make_rollouts(step)
        return [self._steps[step] for step in range(first, last + 1)]

    def forget(self, trained: int) -> None:
        """Steps up to `trained` are done with."""
        for step in [step for step in self._steps if step <= trained]:
            del self._steps[step]

    def counts(self, rollouts: StepRollouts) -> tuple[int, int]:
        """(judged, wanted) samples."""
        with self._lock:
            return len(rollouts.judged), rollouts.num_wanted

    def missing(self, rollouts: StepRollouts) -> list[SampleRequest]:
        """Requests that nothing was sampled for yet."""
        with self._lock:
            return rollouts.missing

    def is_done(self, rollouts: StepRollouts) -> bool:
        """Whether everything is judged. Raises what went wrong with it."""
        with self._lock:
            if rollouts.error is not None:
                raise rollouts.error
            return rollouts.is_done

    # -------------------------------------------------------------------------------------------------------- sampling
    def start(self, rollouts: StepRollouts, *, urgent: bool = False) -> None:
        """SGLang: ask for what is missing, once; `urgent` goes before everything that waits."""
        assert self._engine is not None
        if rollouts.started:
            return
        rollouts.started = True
        missing = self.missing(rollouts)
        if missing:
            name = f"rollout-{rollouts.step}"
            threading.Thread(target=self._stream, args=(rollouts, missing, urgent), name=name, daemon=True).start()

    def _stream(self, rollouts: StepRollouts, requests: Sequence[SampleRequest], urgent: bool) -> None:
        assert self._engine is not None
        try:
            with closing(self._engine.stream(requests, urgent=urgent)) as samples:
                for sample in samples:
                    self.arrived(rollouts, [sample])
        except PacsError as error:
            self._fail(rollouts, error)
        self._wake()

    def arrived(self, rollouts: StepRollouts, samples: Iterable[Sample]) -> None:
        """Takes samples in and has them judged. Raises RolloutError for one whose weights this run did not send."""
        for sample in samples:
            self.sent.check(sample)
            with self._lock:
                if sample.id in rollouts.sampled or sample.id in rollouts.cancelled:
                    continue
                rollouts.sampled[sample.id] = sample
            self._submit(rollouts, sample)

    def _submit(self, rollouts: StepRollouts, sample: Sample) -> None:
        assert self._judge is not None
        prompt = rollouts.by_id[sample.prompt_id]
        self._judge.submit(sample, prompt, lambda answer: self._verdict(rollouts, answer))

    def _verdict(self, rollouts: StepRollouts, answer: Sample | RewardError) -> None:
        if isinstance(answer, RewardError):
            self._fail(rollouts, answer)
        else:
            with self._lock:
                surplus = self._judged(rollouts, answer)
            if surplus and self._engine is not None:
                self._engine.cancel(surplus)
        self._wake()

    def _judged(self, rollouts: StepRollouts, sample: Sample) -> list[str]:
        """Takes the verdict; returns requests in flight that are no longer needed."""
        if sample.id in rollouts.cancelled:
            return []
        rollouts.sampled[sample.id] = sample
        rollouts.judged.add(sample.id)
        # The ranks of the embedded engine sample everything at once: nothing can be saved, and order is not chance.
        if rollouts.enough is None or self._engine is None:
            return []
        group = rollouts.whole_group(sample.prompt_id)
        if group is not None and self._admits(group):
            rollouts.num_admitted += 1
        return rollouts.cancel_rest() if rollouts.num_admitted >= rollouts.enough and not rollouts.cancelled else []

    def _fail(self, rollouts: StepRollouts, error: PacsError) -> None:
        with self._lock:
            if rollouts.error is None:
                rollouts.error = error
        self._wake()

    def drop(self, rollouts: StepRollouts) -> None:
        """Nobody waits for it any more: what is in flight ends."""
        if self._engine is not None:
            self._engine.cancel([request.id for request in self.missing(rollouts)])

    # ---------------------------------------------------------------------------------------------------------- buffer
    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Every work with all that was sampled for it, for a checkpoint."""
        with self._lock:
            steps = [self._steps[step] for step in sorted(self._steps)]
            header, arrays = rollouts_to_message(steps)
            header["sent"] = self.sent.state_dict(s for rollouts in steps for s in rollouts.sampled.values())
        return header, arrays

    def load_state(
        self,
        saved: Message,
        prompts: Mapping[str, Prompt],
        requests_of: Callable[[Sequence[Prompt], int], Sequence[SampleRequest]],
    ) -> None:
        """Continues with saved works; what was sampled but not judged is judged now."""
        header, arrays = saved
        self.sent.load_state_dict(header["sent"])
        for rollouts in rollouts_from_message(header, arrays, prompts, requests_of):
            self._steps[rollouts.step] = rollouts
            if self._engine is not None and not rollouts.cancelled:
                whole = [rollouts.whole_group(prompt.id) for prompt in rollouts.prompts]
                rollouts.num_admitted = sum(group is not None and self._admits(group) for group in whole)
            unjudged = [sample for sample in rollouts.sampled.values() if sample.id not in rollouts.judged]
            for sample in unjudged:
                self._submit(rollouts, sample)
            logger.info(
                "step %d: %d of %d samples are in the checkpoint",
                rollouts.step,
                len(rollouts.sampled),
                len(rollouts.requests),
            )
