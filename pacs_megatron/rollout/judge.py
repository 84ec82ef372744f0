"""Judges samples with the reward pool while sampling continues, so that verification costs no extra time.

Concurrency: `submit` and `judge` may be called from any thread. One background thread takes the pool's verdicts and
calls the callback of each sample. It ends with the pool; pending callbacks then receive an error.
"""

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from pacs_megatron.config.schema import Truncated
from pacs_megatron.contracts import Prompt, Sample
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.labels import check_failures, label_of
from pacs_megatron.rewards.pool import RewardPool, Verdict
from pacs_megatron.rewards.registry import AnyReward
from pacs_megatron.rollout.admission import label_sample
from pacs_megatron.runtime.waiting import report_wait

logger = logging.getLogger(__name__)
_WAIT_S = 3600.0
Judged = Callable[[Sample | RewardError], None]
"""Called in the judge's thread with the judged sample, or with the reason why there is no verdict."""


class Judge:
    """Passes samples to the pool. `decode` turns response ids into the verifier's text; it must be thread-safe."""

    def __init__(
        self,
        pool: RewardPool,
        decode: Callable[[np.ndarray], str],
        *,
        options: AnyReward,
        truncated: Truncated,
    ) -> None:
        self._pool = pool
        self._decode = decode
        self._options = options
        self._truncated = truncated
        self._pending: dict[str, tuple[Sample, Judged]] = {}
        self._repeats = itertools.count(1)
        self._lock = threading.Lock()
        self._ended: RewardError | None = None
        self._thread = threading.Thread(target=self._collect, name="judge", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the pool. Delivers the verdicts that exist and a RewardError for every pending sample before it returns."""
        self._pool.close()
        self._thread.join()

    def submit(self, sample: Sample, prompt: Prompt, done: Judged, text: str | None = None) -> None:
        """Submits `sample` and returns at once; `done` is called later. `text` is its response, if it is decoded already.

        Raises RewardError if the pool has ended."""
        with self._lock:
            if self._ended is not None:
                raise self._ended
            # An evaluation that starts over has the same ids, and workers may still judge the first ones.
            key = sample.id if sample.id not in self._pending else f"{sample.id}/{next(self._repeats)}"
            self._pending[key] = (sample, done)
        self._pool.submit(key, prompt, self._decode(sample.response_ids) if text is None else text)

    @report_wait("for the verifier")
    def judge(self, samples: Iterable[Sample], prompts: Mapping[str, Prompt]) -> list[Sample]:
        """Every sample with reward and label, or with `failure`, in the given order.

        Raises RewardError if more than the configured share could not be judged, or if a reward is not a label.
        """
        answers: queue.SimpleQueue[Sample | RewardError] = queue.SimpleQueue()
        order: list[str] = []
        for sample in samples:
            order.append(sample.id)
            self.submit(sample, prompts[sample.prompt_id], answers.put)
        judged = received(answers, len(order))
        self.check(list(judged.values()))
        return [judged[sample_id] for sample_id in order]

    def check(self, judged: list[Sample]) -> None:
        """Raises RewardError if more than the configured share of these samples could not be judged."""
        failures = [s.failure for s in judged if s.failure is not None]
        check_failures(failures, len(judged), self._options.max_failure_frac)

    # ------------------------------------------------------------------------------------- in the background thread
    def _collect(self) -> None:
        while True:
            try:
                verdict = self._pool.next_finished(timeout_s=_WAIT_S)
            except RewardError as error:
                self._end(error)
                return
            if verdict is not None:
                with self._lock:
                    sample, done = self._pending.pop(verdict.key)
                done(self._apply(sample, verdict))

    def _end(self, error: RewardError) -> None:
        with self._lock:
            self._ended = error
            pending = list(self._pending.values())
            self._pending.clear()
        for _, done in pending:
            done(error)

    def _apply(self, sample: Sample, verdict: Verdict) -> Sample | RewardError:
        if verdict.reward is None:
            return replace(sample, failure=verdict.failure)
        try:
            label = label_of(verdict.reward, self._options.label_threshold)
        except RewardError as error:
            return RewardError(f"sample {sample.id}: {error}")
        return label_sample(
            sample, verdict.reward, label, judge_truncated=self._truncated == "judge", details=verdict.details
        )


def received(answers: "queue.SimpleQueue[Sample | RewardError]", count: int) -> dict[str, Sample]:
    """Waits for `count` judged samples; by sample id. Raises a RewardError that comes instead of one."""
    judged: dict[str, Sample] = {}
    for _ in range(count):
        answer = answers.get()
        if isinstance(answer, RewardError):
            raise answer
        judged[answer.id] = answer
    return judged
