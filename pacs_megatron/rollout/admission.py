"""Judges samples while sampling continues, selects samples for training, and counts a benchmark's samples by problem."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pacs_megatron.config.reward_options import AnyReward
from pacs_megatron.config.schema import AdmissionOptions, Truncated
from pacs_megatron.contracts import Group, Prompt, Sample, Stop
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.labels import check_failures, label_of
from pacs_megatron.rewards.pool import RewardPool, Verdict
from pacs_megatron.runtime.closing import Closing


def label_sample(
    sample: Sample, reward: float, label: int, *, judge_truncated: bool = False, details: Any = None
) -> Sample:
    """`sample` with its verdict. A truncated response has label 0 for any reward, unless `judge_truncated`."""
    label = 0 if sample.stop is Stop.LENGTH and not judge_truncated else label
    return replace(sample, reward=reward, label=label, reward_details=details)


Judged = Callable[[Sample | RewardError], None]
"""Called in a thread of the pool with the judged sample, or with the error that prevented a verdict."""


class Judge(Closing):
    """A reward pool for samples. `decode` turns response ids into the verifier's text; it must be thread-safe."""

    def __init__(self, options: AnyReward, decode: Callable[[np.ndarray], str], *, truncated: Truncated) -> None:
        self._pool = RewardPool(options)
        self._options, self._decode, self._truncated = options, decode, truncated

    def close(self) -> None:
        """Ends the pool. Delivers the verdicts that exist and a RewardError for every pending sample before it returns."""
        self._pool.close()

    def submit(self, sample: Sample, prompt: Prompt, done: Judged, text: str | None = None) -> None:
        """Submits `sample` and returns; `done` is called later. `text` is the response if it is already decoded.
        Raises RewardError if the pool has ended."""
        response = self._decode(sample.response_ids) if text is None else text
        self._pool.submit(sample.id, prompt, response, lambda verdict: done(self._apply(sample, verdict)))

    def check(self, judged: list[Sample]) -> None:
        """Raises RewardError if more than the configured share of these samples could not be judged."""
        failures = [s.failure for s in judged if s.failure is not None]
        check_failures(failures, len(judged), self._options.max_failure_frac)

    def _apply(self, sample: Sample, verdict: Verdict | RewardError) -> Sample | RewardError:
        if isinstance(verdict, RewardError):
            return verdict
        if verdict.reward is None:
            return replace(sample, failure=verdict.failure)
        try:
            label = label_of(verdict.reward, self._options.label_threshold)
        except RewardError as error:
            return RewardError(f"sample {sample.id}: {error}")
        is_judged = self._truncated == "judge"
        return label_sample(sample, verdict.reward, label, judge_truncated=is_judged, details=verdict.details)


class Admitted(NamedTuple):
    groups: tuple[Group, ...]
    counts: dict[str, int]


def admit(
    groups: Sequence[Group], options: AdmissionOptions, *, min_group_size: int, stale: Collection[str] | None = None
) -> Admitted:
    """Drops stale groups, unjudged and empty samples, truncated ones if configured, then groups that became too small.

    Args:
        groups: every sample has a label or a failure.
        min_group_size: 2 where the objective compares siblings, else 1.
        stale: ids of samples above `max_staleness`; their whole groups are dropped. None: the count is not reported.
    """
    counts = {"unjudged": 0, "truncated": 0, "aborted": 0, "small_groups": 0, "one_class_groups": 0}
    if stale is not None:
        counts["stale_groups"] = 0
    kept: list[Group] = []
    for group in groups:
        if stale and any(sample.id in stale for sample in group.samples):
            counts["stale_groups"] += 1
            continue
        samples = []
        for sample in group.samples:
            if sample.failure is not None:
                counts["unjudged"] += 1
            elif sample.stop is Stop.ABORTED or sample.response_len == 0:
                counts["aborted"] += 1
            elif sample.stop is Stop.LENGTH and options.truncated == "drop":
                counts["truncated"] += 1
            else:
                samples.append(sample)
        if len(samples) < min_group_size:
            counts["small_groups"] += 1
        elif options.drop_one_class_groups and len({s.label for s in samples}) == 1:
            counts["one_class_groups"] += 1
        else:
            kept.append(replace(group, samples=tuple(samples)))
    return Admitted(tuple(kept), counts)


def shuffle_labels(groups: Sequence[Group], *, seed: int, step: int) -> tuple[Group, ...]:
    """Control experiment: permutes the labels of all samples of the step at random, each with its reward."""
    judged = [sample for group in groups for sample in group.samples]
    order = iter(np.random.Generator(np.random.PCG64([seed, step])).permutation(len(judged)))
    verdicts = ({"label": judged[k].label, "reward": judged[k].reward} for k in order)
    return tuple(
        replace(group, samples=tuple(replace(sample, **next(verdicts)) for sample in group.samples)) for group in groups
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemCounts:
    """Samples of one benchmark problem; every metric of an evaluation is computed from them."""

    problem_id: str
    num_samples: int
    """n: responses that the verifier judged"""
    num_correct: int
    num_unjudged: int = 0
    """responses without a verdict; `num_samples` and `num_correct` exclude them"""
    num_truncated: int = 0
    """of all responses, judged or not; `num_tokens` likewise"""
    num_tokens: int = 0


def count_problem(problem_id: str, samples: Sequence[Sample]) -> ProblemCounts:
    """Counts of the judged `samples` of one problem. The judge labels a truncated response by `admission.truncated`."""
    judged = [sample for sample in samples if sample.failure is None]
    return ProblemCounts(
        problem_id=problem_id,
        num_samples=len(judged),
        num_correct=sum(sample.label == 1 for sample in judged),
        num_unjudged=len(samples) - len(judged),
        num_truncated=sum(sample.stop is Stop.LENGTH for sample in samples),
        num_tokens=sum(sample.response_len for sample in samples),
    )
