"""Inputs and outputs of an objective, and protocols of weight receivers and rewards. Imports torch for typing only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pacs_megatron.contracts.samples import Judgement, Prompt

if TYPE_CHECKING:
    import torch

LogprobSource = Literal["step_start", "reference", "value"]
"""`step_start`: the policy with its weights at the start of the step. `reference`: the frozen snapshot. `value`: the
critic at the start of the step, whose pass returns values instead of log-probs."""

Coupling = Literal["token", "sample", "group", "minibatch"]
"""The log-probs that a token's coefficient depends on: only the token's, its sample's, its group's, or all."""

Statistic = Literal["score", "sampler_ratio"]
"""A number per sample, computed from log-probs, that coefficients depend on. `score`: the masked sum of
`Objective.token_scores`. `sampler_ratio`: mean over the response tokens of log pi_step_start - log pi_sampler, nats."""

RewardFn = Callable[[Prompt, str], float | Judgement]
"""Judges the response to a prompt. Raises RewardError if it cannot, instead of returning 0.0."""


@dataclass(slots=True, kw_only=True)
class TokenRecord:
    """Response tokens of one micro-batch, packed: tensors are [t], t = sum of the response lengths; nats."""

    logprobs: torch.Tensor
    """float32, log pi_theta of the sampled token; with the autograd graph during an update"""
    mask: torch.Tensor
    """float32 in {0, 1}; 0 excludes a token from training"""
    sample_of_token: torch.Tensor
    """int64, row in the mini-batch's SampleFacts (so it indexes Prepared's [n] tensors)"""
    response_lens: torch.Tensor
    """int64 [n], of the whole mini-batch"""
    step_start_logprobs: torch.Tensor | None = None
    """at the step's first update these are `logprobs` without gradient"""
    reference_logprobs: torch.Tensor | None = None
    sampler_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    """float32, entropy of the full next-token distribution, with gradient during an update"""
    estimates: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`MiniBatch.estimates`, float32"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """Whole groups of a mini-batch on one device: [m] samples in the order of their ids, [g] groups.

    The methods compute within groups, in the dtype of the values.
    """

    rows: torch.Tensor
    """int64 [m], row in the mini-batch's SampleFacts"""
    labels: torch.Tensor
    """float64 [m], in {0, 1}"""
    response_lens: torch.Tensor
    """float64 [m]"""
    group_of_sample: torch.Tensor
    """int64 [m], 0-based"""
    members: torch.Tensor
    """int64 [g, largest group], positions in [m]; smaller groups are padded with m"""
    num_samples: int
    """N, samples of the whole mini-batch"""

    @property
    def num_groups(self) -> int:
        return len(self.members)

    @property
    def sizes(self) -> torch.Tensor:
        """float64 [g]"""
        return (self.members < len(self.group_of_sample)).sum(1).double()

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """[g], sums of [m] by group, in the order of the members: one fixed order on every device, unlike `index_add`."""
        padded = values.new_zeros(len(values) + 1)
        padded[:-1] = values
        result = values.new_zeros(self.num_groups)
        for column in self.members.unbind(1):
            result = result + padded[column]
        return result

    def centred(self, values: torch.Tensor) -> torch.Tensor:
        """[m], `values` minus their group's mean. Subtracts the first member before it computes the mean, so the result
        is exactly 0 in a group of equal values."""
        shifted = values - values[self.members[:, 0]][self.group_of_sample]
        return shifted - (self.total(shifted) / self.sizes)[self.group_of_sample]

    def std(self, centred: torch.Tensor) -> torch.Tensor:
        """[g], unbiased standard deviation of centred values."""
        return (self.total(centred * centred) / (self.sizes - 1.0)).sqrt()


@dataclass(slots=True, kw_only=True)
class Prepared:
    """Result of `Objective.prepare` for one mini-batch, identical on every rank. Without gradient."""

    per_sample: dict[str, torch.Tensor]
    """float64 [n] each; `token_loss` looks them up by `sample_of_token` (1/N is included)"""
    loss: float | None = None
    """The true objective of the mini-batch, for reporting (nats per sample). None: the masked sum of `token_loss`."""
    metrics: dict[str, float] = field(default_factory=dict)
    denominators: dict[str, float] = field(default_factory=dict)
    """denominators of `metrics` and `token_metrics`, if not the number of samples"""
    zero_gradient: torch.Tensor | None = None
    """bool [n], samples whose gradient (and `token_loss`) is exactly zero: the engine may leave them out. None: unknown"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """Result of one optimizer update. `metrics` are global (the same on every rank)."""

    grad_norm: float
    """before clipping"""
    is_clipped: bool
    lr: float
    metrics: Mapping[str, float]
    denominators: Mapping[str, float] = field(default_factory=dict)
    """weights of `metrics` in a mean over updates, if not the number of samples"""


@runtime_checkable
class WeightReceiver(Protocol):
    """Receives new weights. It samples nothing between begin_update and end_update."""

    def begin_update(self, version: int) -> None: ...

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Receives one whole weight under its Hugging Face name. Raises SyncError."""

    def end_update(self, digest: str) -> None:
        """Ends the update: later samples have (version, digest). Raises SyncError if a weight is missing."""
