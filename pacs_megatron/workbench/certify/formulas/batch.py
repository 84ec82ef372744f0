"""A mini-batch for the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Options = Mapping[str, Any]
"""The section `objective` of the configuration, with all its keys"""
PerSample = list[Tensor]
"""One tensor [response] for each sample, float64; log-probs and entropies in nats"""
Metrics = dict[str, tuple[float, float]]
"""name -> (value, denominator); no value if the denominator is 0"""


@dataclass(kw_only=True)
class Batch:
    """One mini-batch of n samples. `logprobs` and `entropies` have a graph, all else has none."""

    options: Options
    groups: list[list[int]]
    """the samples of each group, as places in this mini-batch"""
    labels: Tensor
    """[n], y, in {0, 1}"""
    rewards: Tensor
    """[n], the verifier's numbers"""
    logprobs: PerSample
    """log pi_theta of each response token"""
    start_logprobs: PerSample
    """of the policy at the start of the step"""
    frozen_logprobs: PerSample
    """of the frozen reference"""
    sampler_logprobs: PerSample
    """of the rollout engine"""
    entropies: PerSample
    """of the policy's whole next-token distributions"""
    rows: list[int]
    """the places of these samples in the rollout batch of the step"""
    step: Batch | None = None
    """the whole rollout batch, with log-probs of the step's start; None: this mini-batch"""
    certainties: PerSample | None = None
    """log sum_v exp z_v - mean_v z_v of each token's logits z at the start of the step"""
    logits: PerSample | None = None
    """of each sampled token at the start of the step"""
    advantages: PerSample | None = None
    """of each token, from a critic"""

    @property
    def size(self) -> int:
        """n"""
        return len(self.logprobs)

    @property
    def lens(self) -> list[int]:
        """|o| of each sample"""
        return [len(logprob) for logprob in self.logprobs]


def mean_and_count(values: Tensor) -> tuple[float, float]:
    """(mean, count) of numbers or truth values; (0, 0) of none."""
    count = float(len(values))
    if count == 0:
        return 0.0, 0.0
    return float(values.double().mean()), count


def zero() -> Tensor:
    """0, to add losses to."""
    return torch.zeros((), dtype=torch.float64)
