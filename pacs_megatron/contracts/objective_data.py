"""Inputs and outputs of an objective. Imports torch for typing only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class TokenRecord:
    """Response tokens of one micro-batch, packed.

    Tensors are [t], t = sum of the response lengths; log-probs and entropies are in nats.
    """

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


@dataclass(slots=True, kw_only=True)
class Prepared:
    """Result of `Objective.prepare` for one mini-batch of n samples, identical on every rank.

    Its tensors have no gradient.
    """

    per_sample: dict[str, torch.Tensor]
    """float64 [n] each; `token_loss` looks them up by `sample_of_token` (1/N is included)"""
    loss: float | None = None
    """The true objective of the mini-batch, for reporting (nats per sample).

    None: the masked sum of `token_loss`.
    """
    metrics: dict[str, float] = field(default_factory=dict)
    denominators: dict[str, float] = field(default_factory=dict)
    """denominators of `metrics` and `token_metrics`, if not the number of samples"""
    zero_gradient: torch.Tensor | None = None
    """bool [n], samples whose gradient (and `token_loss`) is exactly zero: the engine may leave
    them out. None: not known
    """


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
