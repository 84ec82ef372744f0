"""Samples to judged samples: the reward pool runs while sampling goes on, so verifying costs no extra time."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from pacs_megatron.contracts import Prompt, Sample
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.labels import check_failures, label_of
from pacs_megatron.rewards.pool import RewardPool, Verdict
from pacs_megatron.rollout.admission import label_sample

logger = logging.getLogger(__name__)


class Judge:
    """Feeds the pool. `decode` turns response ids into the text that the verifier reads."""

    def __init__(
        self,
        pool: RewardPool,
        decode: Callable[[np.ndarray], str],
        *,
        threshold: float | None,
        max_failure_frac: float,
    ) -> None:
        self._pool = pool
        self._decode = decode
        self._threshold = threshold
        self._max_failure_frac = max_failure_frac

    def judge(self, samples: Iterable[Sample], prompts: Mapping[str, Prompt]) -> list[Sample]:
        """Every sample with reward and label, or with `failure`; in order of arrival of the samples.

        Raises RewardError when more than the configured share could not be judged, or for a reward that is no label.
        """
        arrived: dict[str, Sample] = {}
        judged: dict[str, Sample] = {}
        for sample in samples:
            arrived[sample.id] = sample
            self._pool.submit(sample.id, prompts[sample.prompt_id], self._decode(sample.response_ids))
            while (verdict := self._pool.next_finished(timeout_s=0)) is not None:
                judged[verdict.key] = self._apply(arrived[verdict.key], verdict)
        for verdict in self._pool.results():
            judged[verdict.key] = self._apply(arrived[verdict.key], verdict)
        failures = [s.failure for s in judged.values() if s.failure is not None]
        check_failures(failures, len(judged), self._max_failure_frac)
        return [judged[sample_id] for sample_id in arrived]

    def _apply(self, sample: Sample, verdict: Verdict) -> Sample:
        if verdict.reward is None:
            return replace(sample, failure=verdict.failure)
        try:
            label = label_of(verdict.reward, self._threshold)
        except RewardError as error:
            raise RewardError(f"sample {sample.id}: {error}") from error
        return label_sample(sample, verdict.reward, label)
