"""The samples of one step as columns: SampleFacts on every rank, and the tokens of this rank's
share.

Imports torch for typing only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


class Interrupted(Exception):  # noqa: N818 - not an error, a normal end
    """Raised on all ranks after a stop request on any rank; the loop saves the position of the run
    and returns.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts:
    """Labels, rewards, lengths, ... of the n samples of a step or mini-batch, on every rank."""

    ids: tuple[str, ...]
    groups: np.ndarray
    """int64 [n], 0-based group number without gaps; members of a group need not be adjacent"""
    labels: np.ndarray
    """float64 [n], verifiable outcome in {0, 1}"""
    rewards: np.ndarray
    """float64 [n], the verifier's number"""
    prompt_lens: np.ndarray
    """int64 [n]"""
    response_lens: np.ndarray
    """int64 [n], tokens of the response that the policy wrote, |o_i|"""
    environment_lens: np.ndarray
    """int64 [n], tokens of the response that the environment wrote"""
    truncated: np.ndarray
    """bool [n], ended by length"""
    log_ratio_to_sampler: np.ndarray | None = None
    """float64 [n], the statistic `sampler_ratio`, nats; the engine fills it in where the objective
    declares it
    """
    kl_to_reference: np.ndarray | None = None
    """float64 [n], `Objective.sample_kl`, nats; the engine fills it in where the objective
    subtracts it from the reward
    """
    advantage_abs: np.ndarray | None = None
    """float64 [n], mean |A| over the response tokens; the engine fills it in for an objective with
    a critic
    """

    certainty: np.ndarray | None = None
    """float64 [n], sum over the response tokens of log sum_v exp z_v - mean_v z_v, nats, of the
    logits z at the step's start; the engine fills these three in where the options need them
    """
    logit_min: np.ndarray | None = None
    """float64 [n], least logit of a sampled token at the step's start, nats"""
    logit_max: np.ndarray | None = None
    """float64 [n], largest logit of a sampled token at the step's start, nats"""

    @property
    def num_samples(self) -> int:
        return len(self.ids)

    @property
    def num_groups(self) -> int:
        return len(np.unique(self.groups))

    @property
    def lens(self) -> np.ndarray:
        """int64 [n], all tokens"""
        total: np.ndarray = self.prompt_lens + self.response_lens + self.environment_lens
        return total

    def select(self, index: np.ndarray) -> SampleFacts:
        """The facts of some samples, with group numbers made dense again.

        Args:
            index: int64 [m], rows, in the order of the result.
        """
        selected: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, np.ndarray):
                selected[entry.name] = value[index]

        selected["ids"] = tuple(self.ids[row] for row in index)
        _, dense = np.unique(self.groups[index], return_inverse=True)
        selected["groups"] = dense.astype(np.int64)
        return SampleFacts(**selected)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBuffers:
    """Tokens of some samples of a step: one data-parallel rank's share, or all on rank 0."""

    index: np.ndarray
    """int64 [m], row of each sample in the step's SampleFacts"""
    token_ids: np.ndarray
    """int32 [sum of lens], prompt then response, sample after sample"""
    offsets: np.ndarray
    """int64 [m + 1], into token_ids and writers"""
    writers: np.ndarray
    """uint8 [sum of lens], the `Writer` of each token"""
    sampler_logprobs: np.ndarray
    """float32 [sum of response lens], nats"""
    response_offsets: np.ndarray
    """int64 [m + 1], into sampler_logprobs"""
    routes: np.ndarray | None = None
    """int16 [sum of (lens - 1), layers, top k], the sampler's experts that training replays; None:
    no replay
    """

    def by_sample(self, column: np.ndarray) -> list[np.ndarray]:
        """The values of each sample in a response column, as views.

        Args:
            column: [sum of response lens], or [0] on a rank that does not have the column.

        Returns:
            [response] each, in the order of `index`; none on a rank without the column.
        """
        if not len(column):
            return []
        return np.split(column, self.response_offsets[1:-1])

    def routes_of(self, position: int) -> np.ndarray:
        """int16 [prompt + response - 1, layers, top k] of the sample at `position`."""
        assert self.routes is not None
        # Each earlier sample has one row less than tokens: its last token is no input.
        first = self.offsets[position] - position
        end = self.offsets[position + 1] - position - 1
        return self.routes[first:end]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """Assignment of samples to the micro-batches of each data-parallel rank, in order."""

    by_dp_rank: tuple[tuple[np.ndarray, ...], ...]
    """[d][k]: rows (int64, into the mini-batch's SampleFacts) of micro-batch k on rank d; empty: a
    padding micro-batch
    """
    together: np.ndarray
    """bool [n], samples of groups that are kept in one micro-batch; such a micro-batch contains
    whole groups only
    """

    def loads(self, facts: SampleFacts) -> list[int]:
        """Number of tokens of each data-parallel rank."""
        lens = facts.lens
        loads = []
        for batches in self.by_dp_rank:
            loads.append(int(sum(lens[rows].sum() for rows in batches)))
        return loads

    def owners(self, num_samples: int) -> np.ndarray:
        """int64 [n], data-parallel rank of each row; -1 for a row without a micro-batch."""
        owner = np.full(num_samples, -1, dtype=np.int64)
        for rank, batches in enumerate(self.by_dp_rank):
            for rows in batches:
                owner[rows] = rank
        return owner


@dataclass(slots=True, kw_only=True)
class MiniBatch:
    """One mini-batch (one optimizer update): facts of all its samples, this rank's tokens, and the
    plan.

    Log-probs and estimates are response columns of this rank's samples: float32
    [sum of response lens], on the device, in the order of `tokens.index`. Only the last pipeline
    stage has their values; elsewhere they are [0].
    """

    facts: SampleFacts
    rows: np.ndarray
    """int64 [n], row of each sample in the step's SampleFacts"""
    tokens: TokenBuffers
    """`tokens.index` points into `facts`"""
    plan: MicroBatchPlan
    index: int = 0
    """0-based number of the update in the step; at 0 the policy has the step-start weights"""
    step_start_logprobs: torch.Tensor | None = None
    """nats, of the policy at the start of this step, from the trainer"""
    reference_logprobs: torch.Tensor | None = None
    """nats"""
    routes: dict[int, np.ndarray] | None = None
    """experts of this rank's samples for the score pass and the update (policy/routing.py); None:
    the routers select them. The sampler's experts are set before any pass, and the `step_start`
    pass also uses them
    """
    estimates: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """with a critic: `value` at the step's start, whitened `advantage`, and `return`; where the
    options need them: `certainty` and `logit` of a token at the step's start, nats
    """
