"""STEER (arXiv:2510.10150): less weight on the tokens that change the entropy most.

    Omega = |A / pi_step_start * p (1 - p) (log p + H)|
    w = exp(log(weight_min) * Omega / max(Omega_max, 0.02))

of each token, without gradient: p = pi_theta of the token, H the entropy of the whole next-token
distribution. So w is in [weight_min, 1]. The token's term of GRPO's surrogate is multiplied by w:

    l = -w min(rho A, clip(rho, 1 - low, 1 + high) A), at most ratio_max |A| where A < 0

per token, mean over all tokens of the mini-batch. The formulas and the defaults (weight_min 0.8,
clip 0.2 / 0.28, ratio_max 10) are those of zz-haooo/STEER, commit b31df71 (`compute_token_weights`
and `compute_policy_loss_with_entropy` in verl/trainer/ppo/core_algos.py, run/run_exp.sh); its
linear weights, between 0.8 and 1.2, are not here.

Omega_max is the largest Omega of the mini-batch, so an update needs a score pass. The authors'
code takes the largest one of a micro-batch on each rank: there the weights depend on how the
mini-batch is cut.
"""

import math
from typing import ClassVar, Literal

from pydantic import Field

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.objectives.shared.base import StepInputs, at_tokens, required
from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.policy_gradient import (
    BoundedOptions,
    BoundedPolicyGradient,
    TokenMeanOptions,
)
from pacs_megatron.objectives.shared.sample_table import SampleTable

SMALLEST_PROBABILITY = 1e-8
"""of the authors; bounds p from both sides, and pi_step_start from below"""
SMALLEST_MAXIMUM = 0.02
"""of the authors; below it w stays near 1"""


class SteerOptions(TokenMeanOptions, BoundedOptions):
    """STEER: clipped policy gradient with less weight on tokens that change the entropy."""

    name: Literal["steer"]
    """Name of the objective."""
    clip_high: float = Field(default=0.28, gt=0)
    """Clip the probability ratio at 1 + clip_high from above."""
    weight_min: float = Field(default=0.8, gt=0, lt=1)
    """Weight of the token that changes the entropy most."""


class Steer(BoundedPolicyGradient, options=SteerOptions):
    """STEER; see `PolicyGradient` for the arguments."""

    options: SteerOptions
    score_is_maximum: ClassVar[bool] = True
    score_has_entropy: ClassVar[bool] = True

    def __init__(self, options: SteerOptions) -> None:
        super().__init__(options)
        self.coupling = "minibatch"
        self.coupled_by["score"] = 0

    def token_scores(self, tokens: TokenRecord) -> Tensor:
        """|Omega / A| of each token, float64 [t]; `couple` multiplies the largest one by |A|."""
        probability = tokens.logprobs.double().exp()
        probability = probability.clamp(SMALLEST_PROBABILITY, 1.0 - SMALLEST_PROBABILITY)
        entropy = required(tokens.entropy, "entropies").detach().double()
        start = self._step_start(tokens).double().exp().clamp(SMALLEST_PROBABILITY, 1.0)
        change = probability * (1.0 - probability) * (probability.log() + entropy)
        return (change / start).abs()

    def couple(
        self,
        table: SampleTable,
        scores: Tensor | None,
        sampler_ratios: Tensor | None,
        known: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Adds `decay`, -log w / Omega, float64 [m], the same for all samples."""
        per_sample = super().couple(table, scores, sampler_ratios, known)
        sizes = required(scores, "scores") * known["advantage"].abs()
        # A padding micro-batch has no sample.
        largest = torch.cat([sizes, sizes.new_tensor([SMALLEST_MAXIMUM])]).max()
        decay = -math.log(self.options.weight_min) / largest
        return per_sample | {"decay": decay.expand(len(sizes))}

    def token_factor(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """w of each token, [t], without gradient."""
        advantage = at_tokens(prepared.per_sample["advantage"], tokens)
        decay = at_tokens(prepared.per_sample["decay"], tokens)
        with torch.no_grad():
            omega = advantage.abs() * self.token_scores(tokens)
            weight = torch.exp(-decay * omega).clamp(self.options.weight_min, 1.0)
        return weight.to(tokens.logprobs.dtype)

    def prepare(
        self, scores: Tensor | None, facts: SampleFacts, step_inputs: StepInputs
    ) -> Prepared:
        """Same as `PolicyGradient`, with the denominator of `steer/weight_mean`."""
        prepared = super().prepare(scores, facts, step_inputs)
        prepared.denominators["steer/weight_mean"] = prepared.denominators["steer/clip_frac"]
        return prepared

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, Tensor]:
        """Those of `PolicyGradient`, and `steer/weight_mean`, the mean of w over the tokens."""
        metrics = super().token_metrics(tokens, prepared)
        num_tokens = tokens.response_lens.sum().clamp(min=1)
        metrics["steer/weight_mean"] = self.token_factor(tokens, prepared) / num_tokens
        return metrics
