"""Protocols of an objective, a policy, a rollout engine and a reward. torch is imported for typing only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from pacs_megatron.contracts.samples import Prompt, Sample, SampleRequest
from pacs_megatron.contracts.step_data import MiniBatch, SampleFacts

if TYPE_CHECKING:
    import torch

LogprobSource = Literal["step_start", "reference"]
"""`step_start`: the policy's own weights at the start of the step. `reference`: the frozen snapshot."""


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
    reference_logprobs: torch.Tensor | None = None
    sampler_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    """float32, entropy of the full next-token distribution; no gradient"""


@dataclass(slots=True, kw_only=True)
class Prepared:
    """Result of `Objective.prepare` for one mini-batch, identical on every rank, without gradient."""

    per_sample: dict[str, torch.Tensor]
    """float64 [n] each; `token_loss` indexes them with `sample_of_token` (1/N is already inside)"""
    loss: float | None
    """The true objective of the mini-batch, for reporting (nats a sample). None: it is the masked sum of `token_loss`
    over the mini-batch."""
    metrics: dict[str, float] = field(default_factory=dict)
    zero_gradient: torch.Tensor | None = None
    """bool [n], samples whose gradient (and `token_loss`) is exactly zero; forward and backward may skip them.
    None: no such sample is known."""


@runtime_checkable
class Objective(Protocol):
    """Pure tensor functions; no process groups, no Megatron. `updates_per_step` is known at construction."""

    name: str

    def logprob_passes(self) -> frozenset[LogprobSource]:
        """Trainer log-probs that every mini-batch needs before its first update (empty: none)."""
        ...

    def needs_scores(self, update_index: int) -> bool:
        """True if update `update_index` (0-based in the step) needs a score pass (no gradient) first."""
        ...

    def token_scores(self, tokens: TokenRecord) -> torch.Tensor:
        """float64 [t]; the engine masks it and sums it by sample in fp64 to r_j. Called without grad."""
        ...

    def prepare_step(self, facts: SampleFacts) -> Any:
        """Once a step, over the whole rollout batch (advantages, batch-wide norms). Input of `prepare`."""
        ...

    def prepare(self, scores: torch.Tensor | None, facts: SampleFacts, step_inputs: Any) -> Prepared:
        """One mini-batch: `scores` float64 [n] ordered as `facts`, None when `needs_scores` was False."""
        ...

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> torch.Tensor:
        """[t], dtype of `tokens.logprobs`; the engine masks and SUMS it over everything, and divides nowhere."""
        ...

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, torch.Tensor]:
        """Metrics that need the update's own log-probs: name -> [t], divided by the mini-batch's count already, so the
        engine treats them like `token_loss`: mask, sum over everything, divide nowhere. Called without grad. The same
        keys for every micro-batch; empty when there are none."""
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
class PolicyEngine(Protocol):
    """The trained model. Every method is collective: all ranks call it, in the same order."""

    version: int

    def logprobs(
        self, minibatch: MiniBatch, source: LogprobSource, should_stop: Callable[[], bool] | None = None
    ) -> dict[int, Any]:
        """Raises Interrupted on every rank if `should_stop` returns True on one of them during the pass."""
        ...

    def scores(
        self, minibatch: MiniBatch, objective: Objective, should_stop: Callable[[], bool] | None = None
    ) -> torch.Tensor: ...

    def update(
        self, minibatch: MiniBatch, prepared: Prepared, objective: Objective, scores: torch.Tensor | None
    ) -> UpdateReport: ...

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and full tensors, one at a time, bounded memory; every rank iterates to the end."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """Takes new weights; nothing is sampled between begin_update and end_update."""

    def begin_update(self, version: int) -> None: ...

    def put(self, name: str, tensor: torch.Tensor) -> None: ...

    def end_update(self, digest: str) -> None:
        """Raises SyncError unless every weight has arrived; afterwards samples carry (version, digest)."""
        ...


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples responses."""

    def stream(self, requests: Sequence[SampleRequest]) -> Iterator[Sample]:
        """Samples as they finish, in any order; exactly one for each request."""
        ...

    def cancel(self, ids: Sequence[str]) -> None: ...


@runtime_checkable
class RewardFn(Protocol):
    """Judges one answer. Raises RewardError when it cannot; never a silent 0.0."""

    def __call__(self, prompt: Prompt, response: str) -> float: ...


@runtime_checkable
class Stateful(Protocol):
    """Has state that belongs into a checkpoint; plain JSON values only."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
