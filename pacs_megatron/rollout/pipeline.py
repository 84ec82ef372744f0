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
from pacs_megatron.rollout.lag import SentWeights
from pacs_megatron.rollout.sample_arrays import Message
from pacs_megatron.rollout.sglang_client import SglangEngine
from pacs_megatron.rollout.work import Work, works_from_message, works_to_message

logger = logging.getLogger(__name__)


class Pipeline:
    """The works of a run; `dispatch` of the step after the last dispatched one makes the next."""

    def __init__(
        self,
        judge: Judge | None,
        engine: SglangEngine | None,
        make_work: Callable[[int], Work],
        wake: Callable[[], None],
        admits: Callable[[Group], bool] = lambda _group: True,
    ) -> None:
        """`make_work(step)` takes the step's prompts from the data; `wake` and `admits` may be called from any thread.
        `admits` says whether a whole group will be trained, for works that need not have all of theirs."""
        self._admits = admits
        self._judge = judge
        self._engine = engine
        self._make_work = make_work
        self._wake = wake
        self._lock = threading.Lock()
        self._works: dict[int, Work] = {}
        self.sent = SentWeights()

    # ------------------------------------------------------------------------------------------------------- the works
    def dispatch(self, first: int, last: int) -> list[Work]:
        """The works of steps `first` to `last`, made where they are not there; `start` has them sampled."""
        for step in range(first, last + 1):
            if step not in self._works:
                self._works[step] = self._make_work(step)
        return [self._works[step] for step in range(first, last + 1)]

    def forget(self, trained: int) -> None:
        """Steps up to `trained` are done with."""
        for step in [step for step in self._works if step <= trained]:
            del self._works[step]

    def counts(self, work: Work) -> tuple[int, int]:
        """(judged, wanted) samples."""
        with self._lock:
            return len(work.judged), work.num_wanted

    def missing(self, work: Work) -> list[SampleRequest]:
        """Requests that nothing was sampled for yet."""
        with self._lock:
            return work.missing

    def is_done(self, work: Work) -> bool:
        """Whether everything is judged. Raises what went wrong with it."""
        with self._lock:
            if work.error is not None:
                raise work.error
            return work.is_done

    # -------------------------------------------------------------------------------------------------------- sampling
    def start(self, work: Work, *, urgent: bool = False) -> None:
        """SGLang: ask for what is missing, once; `urgent` goes before everything that waits."""
        assert self._engine is not None
        if work.started:
            return
        work.started = True
        missing = self.missing(work)
        if missing:
            name = f"rollout-{work.step}"
            threading.Thread(target=self._stream, args=(work, missing, urgent), name=name, daemon=True).start()

    def _stream(self, work: Work, requests: Sequence[SampleRequest], urgent: bool) -> None:
        assert self._engine is not None
        try:
            with closing(self._engine.stream(requests, urgent=urgent)) as samples:
                for sample in samples:
                    self.arrived(work, [sample])
        except PacsError as error:
            self._fail(work, error)
        self._wake()

    def arrived(self, work: Work, samples: Iterable[Sample]) -> None:
        """Takes samples in and has them judged. Raises RolloutError for one whose weights this run did not send."""
        for sample in samples:
            self.sent.check(sample)
            with self._lock:
                if sample.id in work.sampled or sample.id in work.cancelled:
                    continue
                work.sampled[sample.id] = sample
            self._submit(work, sample)

    def _submit(self, work: Work, sample: Sample) -> None:
        assert self._judge is not None
        prompt = work.by_id[sample.prompt_id]
        self._judge.submit(sample, prompt, lambda answer: self._verdict(work, answer))

    def _verdict(self, work: Work, answer: Sample | RewardError) -> None:
        if isinstance(answer, RewardError):
            self._fail(work, answer)
        else:
            with self._lock:
                surplus = self._judged(work, answer)
            if surplus and self._engine is not None:
                self._engine.cancel(surplus)
        self._wake()

    def _judged(self, work: Work, sample: Sample) -> list[str]:
        """Takes the verdict; returns requests in flight that are no longer needed."""
        if sample.id in work.cancelled:
            return []
        work.sampled[sample.id] = sample
        work.judged.add(sample.id)
        # The ranks of the embedded engine sample everything at once: nothing can be saved, and order is not chance.
        if work.enough is None or self._engine is None:
            return []
        group = work.whole_group(sample.prompt_id)
        if group is not None and self._admits(group):
            work.num_admitted += 1
        return work.cancel_rest() if work.num_admitted >= work.enough and not work.cancelled else []

    def _fail(self, work: Work, error: PacsError) -> None:
        with self._lock:
            if work.error is None:
                work.error = error
        self._wake()

    def drop(self, work: Work) -> None:
        """Nobody waits for it any more: what is in flight ends."""
        if self._engine is not None:
            self._engine.cancel([request.id for request in self.missing(work)])

    # ---------------------------------------------------------------------------------------------------------- buffer
    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Every work with all that was sampled for it, for a checkpoint."""
        with self._lock:
            works = [self._works[step] for step in sorted(self._works)]
            header, arrays = works_to_message(works)
            header["sent"] = self.sent.state_dict(s for work in works for s in work.sampled.values())
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
        for work in works_from_message(header, arrays, prompts, requests_of):
            self._works[work.step] = work
            if self._engine is not None and not work.cancelled:
                whole = [work.whole_group(prompt.id) for prompt in work.prompts]
                work.num_admitted = sum(group is not None and self._admits(group) for group in whole)
            unjudged = [sample for sample in work.sampled.values() if sample.id not in work.judged]
            for sample in unjudged:
                self._submit(work, sample)
            logger.info(
                "step %d: %d of %d samples are in the checkpoint", work.step, len(work.sampled), len(work.requests)
            )
