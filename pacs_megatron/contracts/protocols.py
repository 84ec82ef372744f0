"""Protocols of an objective, a rollout engine, a receiver of weights and a reward. torch is imported for typing only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from pacs_megatron.contracts.samples import Judgement, Prompt, Sample, SampleRequest
from pacs_megatron.contracts.step_data import SampleFacts

if TYPE_CHECKING:
    import numpy as np
    import torch

LogprobSource = Literal["step_start", "reference", "value"]
"""`step_start`: the policy's own weights at the start of the step. `reference`: the frozen snapshot. `value`: the critic at
the start of the step, whose pass has a value in the place of each log-prob."""

Coupling = Literal["token", "sample", "group", "minibatch"]
"""The samples whose log-probs a token's coefficient depends on: none but the token's own, its sample's, its group's, all."""

Statistic = Literal["score", "sampler_ratio"]
"""A number per sample, from log-probs, that coefficients depend on. `score`: the masked sum of `Objective.token_scores`.
`sampler_ratio`: mean over the response tokens of log pi_step_start - log pi_sampler, nats."""


@dataclass(slots=True, kw_only=True)
class TokenRecord:
    """Response tokens of one micro-batch, packed: every tensor is [t] unless stated otherwise; nats.

    It contains response tokens only (t = sum of the response lengths), so no prompt or padding token can enter
    a sum; `mask` excludes response tokens that are not trained.
    """

    logprobs: torch.Tensor
    """float32, log pi_theta of the sampled token; carries the graph during an update"""
    mask: torch.Tensor
    """float32 in {0, 1}"""
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
    """Whole groups of a mini-batch as tensors on one device: [m] samples in the order of their ids, [g] groups."""

    rows: torch.Tensor
    """int64 [m], row in the mini-batch's SampleFacts"""
    labels: torch.Tensor
    """float64 [m], in {0, 1}"""
    response_lens: torch.Tensor
    """float64 [m]"""
    group_of_sample: torch.Tensor
    """int64 [m], 0-based"""
    members: torch.Tensor
    """int64 [g, largest group], positions in [m]; m in the unused places of smaller groups"""
    num_samples: int
    """N, samples of the whole mini-batch"""


@dataclass(slots=True, kw_only=True)
class Prepared:
    """Result of `Objective.prepare` for one mini-batch, identical on every rank. Without gradient."""

    per_sample: dict[str, torch.Tensor]
    """float64 [n] each; `token_loss` looks them up by `sample_of_token` (1/N is included)"""
    loss: float | None = None
    """The true objective of the mini-batch, for reporting (nats per sample). None: the masked sum of `token_loss`."""
    metrics: dict[str, float] = field(default_factory=dict)
    denominators: dict[str, float] = field(default_factory=dict)
    """of `metrics` and `token_metrics` whose denominator is not the number of samples"""
    zero_gradient: torch.Tensor | None = None
    """bool [n], samples whose gradient (and `token_loss`) is exactly zero: the engine may leave them out of forward and
    backward. None: no such sample is known."""


@runtime_checkable
class Objective(Protocol):
    """Pure tensor functions; no process groups, no Megatron. `updates_per_step` is known at construction.

    An objective declares its coupling and the statistics that its coefficients depend on. The engine then computes the
    statistics at the lowest exact cost: in the update's own forward where the coupled samples are in one micro-batch
    (`couple`), else in a forward-only pass before the update.
    """

    name: str
    coupling: Coupling
    kl_in_reward: bool
    """`prepare_step` needs `SampleFacts.kl_to_reference`"""
    critic: Objective | None
    """the objective of the critic's updates, whose records have values as `logprobs`. None: no critic, no `estimate`"""

    def logprob_passes(self, update_index: int) -> frozenset[LogprobSource]:
        """Log-prob passes that the mini-batch of update `update_index` (0-based in the step) needs before the update.

        The first update needs no `step_start` pass: its own forward computes these log-probs.
        """
        ...

    def statistics(self, update_index: int) -> frozenset[Statistic]:
        """Statistics that the coefficients of update `update_index` depend on; empty: they are known beforehand."""
        ...

    def token_scores(self, tokens: TokenRecord) -> torch.Tensor:
        """float64 [t]; the engine masks it and sums it by sample in float64. Called without grad."""
        ...

    def known(self, facts: SampleFacts, step_inputs: Any) -> dict[str, torch.Tensor]:
        """Per-sample values of the whole mini-batch that no statistic changes, float64 [n]: inputs of `couple`."""
        ...

    def couple(
        self,
        table: SampleTable,
        scores: torch.Tensor | None,
        sampler_ratios: torch.Tensor | None,
        known: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """`Prepared.per_sample` of coupled samples, from their statistics; every tensor is float64 [m], on any device.

        The samples are whole groups with coupling `group`, any samples with coupling `sample`. `known`: of these samples.
        Runs between forward and backward: it neither raises nor synchronises with the host.
        """
        ...

    def sample_kl(self, step_start: np.ndarray, reference: np.ndarray) -> float:
        """With `kl_in_reward`: a sample's estimate of the KL to the reference, from its log-probs, float32 [response]."""
        ...

    def estimate(
        self,
        rewards: Sequence[float],
        values: Sequence[np.ndarray],
        step_starts: Sequence[np.ndarray],
        references: Sequence[np.ndarray],
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """With a critic: (advantages, returns) of samples from its values and, where declared, log-probs; float64 [response].

        The engine whitens the advantages over all tokens of the step.
        """
        ...

    def prepare_step(self, facts: SampleFacts) -> Any:
        """Once a step, over the whole rollout batch (advantages, batch-wide norms). Input of `prepare`."""
        ...

    def prepare(self, scores: torch.Tensor | None, facts: SampleFacts, step_inputs: Any) -> Prepared:
        """The whole mini-batch: coefficients, true loss and metrics. `scores` float64 [n] as `facts`; None: not declared.

        Called before the update if no statistics are declared, else after its backward, for loss and metrics.
        """
        ...

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> torch.Tensor:
        """[t], dtype of `tokens.logprobs`; the engine masks it and sums it over the mini-batch, without any division.

        A token's value depends on no other token's log-prob: the engine evaluates any part of a micro-batch alone. What
        couples tokens or samples is a statistic, and enters through `prepared`.
        """
        ...

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, torch.Tensor]:
        """Metrics from the update's own log-probs: name -> [t], already divided by the mini-batch's count, so the engine
        masks and sums them like `token_loss`. Called without grad. The same keys for every micro-batch; may be empty."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One optimizer update. `metrics` are global (the same on every rank)."""

    grad_norm: float
    """before clipping"""
    is_clipped: bool
    lr: float
    metrics: Mapping[str, float]
    denominators: Mapping[str, float] = field(default_factory=dict)
    """weights of `metrics` in a mean over updates, where the weight is not the number of samples"""


@runtime_checkable
class WeightReceiver(Protocol):
    """Takes new weights; nothing is sampled between begin_update and end_update."""

    def begin_update(self, version: int) -> None:
        """Starts an update; the present weights are not used any more."""
        ...

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """One whole weight under its Hugging Face name. Raises SyncError."""
        ...

    def end_update(self, digest: str) -> None:
        """Raises SyncError unless every weight has arrived; afterwards samples carry (version, digest)."""
        ...


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples responses."""

    def stream(self, requests: Sequence[SampleRequest]) -> Iterator[Sample]:
        """Samples as they finish, in any order; exactly one for each request."""
        ...

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancels these requests. Ignores unknown ids."""
        ...


@runtime_checkable
class RewardFn(Protocol):
    """Judges one answer. Raises RewardError when it cannot; never a silent 0.0."""

    def __call__(self, prompt: Prompt, response: str) -> float | Judgement: ...
