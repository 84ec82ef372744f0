"""Selects the groups of a step for training."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pacs_megatron.config.schema import AdmissionOptions
from pacs_megatron.contracts import Group, Stop


class Admitted(NamedTuple):
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
        min_group_size: 2 where the objective compares siblings, else 1.
        stale: ids of samples above `max_staleness`; their whole groups are dropped. None: the count
            is not reported.
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
    """Control experiment: permutes the labels of all samples of the step at random, each with its
    reward.
    """
    judged = [sample for group in groups for sample in group.samples]
    order = iter(np.random.Generator(np.random.PCG64([seed, step])).permutation(len(judged)))
    verdicts = ({"label": judged[k].label, "reward": judged[k].reward} for k in order)
    return tuple(
        replace(group, samples=tuple(replace(sample, **next(verdicts)) for sample in group.samples))
        for group in groups
    )
