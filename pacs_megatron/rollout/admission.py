"""Judged samples: selection of those to train (dropped ones are counted), and counts per problem of a benchmark."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pacs_megatron.config.schema import AdmissionOptions
from pacs_megatron.contracts import Group, Sample, Stop


class Admitted(NamedTuple):
    """Groups to train, and counts of the dropped samples and groups."""

    groups: tuple[Group, ...]
    counts: dict[str, int]


def label_sample(
    sample: Sample, reward: float, label: int, *, judge_truncated: bool = False, details: Any = None
) -> Sample:
    """`sample` with its verdict. A truncated response has label 0 for any reward, unless `judge_truncated`."""
    label = 0 if sample.stop is Stop.LENGTH and not judge_truncated else label
    return replace(sample, reward=reward, label=label, reward_details=details)


def admit(
    groups: Sequence[Group], options: AdmissionOptions, *, min_group_size: int, stale: Collection[str] | None = None
) -> Admitted:
    """Drops stale groups, unjudged and empty samples, truncated ones if configured, then groups that became too small.

    Args:
        groups: every sample has a label or a failure.
        min_group_size: 2 where the objective compares siblings, else 1.
        stale: ids of samples from weights older than the run allows. Their groups are dropped whole: the remaining
            siblings would be compared with responses of another policy. None: no check and no count.
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
    """c of those n"""
    num_unjudged: int = 0
    """responses without a verdict, in neither number"""
    num_truncated: int = 0
    """of all responses, as the tokens"""
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
