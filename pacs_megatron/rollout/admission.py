"""Selects the groups of a step for training."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pacs_megatron.config.schema import AdmissionOptions
from pacs_megatron.contracts import Group, Sample, Stop


class Admitted(NamedTuple):
    """The groups to train on, and how many samples and groups were dropped, by reason."""

    groups: tuple[Group, ...]
    counts: dict[str, int]


def admit(
    groups: Sequence[Group],
    options: AdmissionOptions,
    *,
    min_group_size: int,
    stale: Collection[str] | None = None,
) -> Admitted:
    """Drops stale groups, unjudged and empty samples, truncated ones if configured, then groups
    that became too small.

    Args:
        groups: every sample has a label or a failure.
        options: whether truncated samples and groups of one class are dropped.
        min_group_size: 2 where the objective compares siblings, else 1.
        stale: ids of samples above `max_staleness`; their whole groups are dropped. None: the count
            is not reported.
    """
    counts = {"unjudged": 0, "truncated": 0, "aborted": 0, "small_groups": 0, "one_class_groups": 0}
    if stale is not None:
        counts["stale_groups"] = 0

    admitted: list[Group] = []
    for group in groups:
        if stale and any(sample.id in stale for sample in group.samples):
            counts["stale_groups"] += 1
            continue

        samples = []
        for sample in group.samples:
            reason = _reason_to_drop(sample, options)
            if reason is None:
                samples.append(sample)
            else:
                counts[reason] += 1

        if len(samples) < min_group_size:
            counts["small_groups"] += 1
        elif options.drop_one_class_groups and len({sample.label for sample in samples}) == 1:
            counts["one_class_groups"] += 1
        else:
            admitted.append(replace(group, samples=tuple(samples)))
    return Admitted(tuple(admitted), counts)


def shuffle_labels(groups: Sequence[Group], *, seed: int, step: int) -> tuple[Group, ...]:
    """Control experiment: permutes the labels of all samples of the step at random, each with its
    reward.
    """
    verdicts: list[Sample] = []
    for group in groups:
        verdicts.extend(group.samples)
    generator = np.random.Generator(np.random.PCG64([seed, step]))
    order = iter(generator.permutation(len(verdicts)))

    shuffled = []
    for group in groups:
        samples = []
        for sample in group.samples:
            verdict = verdicts[next(order)]
            samples.append(replace(sample, label=verdict.label, reward=verdict.reward))
        shuffled.append(replace(group, samples=tuple(samples)))
    return tuple(shuffled)


def _reason_to_drop(sample: Sample, options: AdmissionOptions) -> str | None:
    """The name of the count, or None for a sample to train on."""
    if sample.failure is not None:
        return "unjudged"
    if sample.stop is Stop.ABORTED or sample.response_len == 0:
        return "aborted"
    if sample.stop is Stop.LENGTH and options.truncated == "drop":
        return "truncated"
    return None
