"""VIMPO (arXiv:2606.20008): a value that is implicit in the policy, without a critic.

    rho_t = beta (log pi_theta - log pi_reference)
    kappa_t = beta KL_t, an estimate of KL(pi_theta || pi_reference) at token t, without gradient
    L_V = 1/2 (sum_t (rho_t - kappa_t) - (R - mean))^2          of a response, mean over responses
    A_t = sum_{l >= t} lam^(l - t) (rho_l - kappa_l)            at the step's start, whitened
    L = L_V + actor_coef L_A

with the mean of R over the group. L_A is GRPO's surrogate with the advantages A_t of tokens, at
most ratio_max |A_t| where A_t < 0, mean over all tokens of the mini-batch. So the rewards enter
through L_V alone. A is whitened over all tokens of the rollout batch.

The formulas and the defaults (beta 5e-4, actor_coef 5e-3, lam 1, clip 0.2 / 0.28, ratio_max 10) are
those of backprop07/VIMPO, commit 2aa83bc (recipe/vimpo/vimpo_core_algos.py). Its default KL is that
of the whole vocabulary, which needs the reference's logits beside the policy's; `value_kl` has its
estimates from the sampled token. The authors whiten over a micro-batch of all ranks, and their A_t
follows the policy within a step, whose updates are one by default: here it is that of the step's
start.
"""

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.objectives.ppo import gae
from pacs_megatron.objectives.shared.base import StepInputs, at_tokens, required
from pacs_megatron.objectives.shared.groups import FloatArray
from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.policy_gradient import (
    BoundedOptions,
    BoundedPolicyGradient,
    TokenMeanOptions,
    estimate_kl,
)
from pacs_megatron.objectives.shared.sample_table import SampleTable


class VimpoOptions(TokenMeanOptions, BoundedOptions):
    """VIMPO: regression of the policy's implicit value on the rewards, and a policy gradient with
    the advantages of that value.
    """

    name: Literal["vimpo"]
    """Name of the objective."""
    clip_high: float = Field(default=0.28, gt=0)
    """Clip the probability ratio at 1 + clip_high from above."""
    beta: float = Field(default=5e-4, gt=0)
    """Value of a nat of the log-ratio to the frozen reference, in units of the reward."""
    actor_coef: float = Field(default=5e-3, ge=0)
    """Weight of the policy gradient beside the loss of the value."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of the advantages: 1 sums all later tokens, 0 takes the token's own term."""
    value_kl: Literal["k2", "k3"] = "k3"
    """Estimate of a token's KL divergence inside the value, as in `kl_estimator`."""

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        if self.kl_coef > 0:
            raise ValueError(
                f"objective.kl_coef={self.kl_coef} does not go with objective.name=vimpo, whose "
                "value has the KL to the frozen reference; remove it, or change beta"
            )
        return self


class Vimpo(BoundedPolicyGradient, options=VimpoOptions):
    """VIMPO; see `PolicyGradient` for the arguments."""

    options: VimpoOptions
    has_estimates = True

    def __init__(self, options: VimpoOptions) -> None:
        super().__init__(options)
        self.passes = {"step_start": 0, "reference": 0}
        self.coupled_by["score"] = 0
        self.coupling = "sample"

    def estimate(
        self,
        rewards: Sequence[float],
        values: Sequence[FloatArray],
        step_starts: Sequence[FloatArray],
        references: Sequence[FloatArray],
    ) -> tuple[list[FloatArray], list[FloatArray]]:
        """Advantages before whitening, float64 [response] each, and no returns.

        Args:
            rewards: not used.
            values: not used.
            step_starts: [response] each, log-probs.
            references: [response] each, log-probs.
        """
        terms = []
        for start, reference in zip(step_starts, references, strict=True):
            log_ratio = torch.from_numpy(start.astype(np.float64) - reference)
            terms.append(self._value(log_ratio).numpy())
        zeros = [np.zeros(len(term)) for term in terms]
        return gae(terms, zeros, 1.0, self.options.lam), []

    def advantages(self, rewards: Tensor, table: SampleTable) -> Tensor:
        """R - mean of the group, float64 [m]: the target of the value."""
        return table.centred(rewards)

    def prepare_step(self, facts: SampleFacts) -> StepInputs:
        """`advantage`: mean |A| of each sample, from the engine; `target` of the value."""
        return {
            "advantage": required(facts.advantage_abs, "facts.advantage_abs"),
            "target": super().prepare_step(facts)["advantage"],
        }

    def has_gradient(self, advantage: Tensor) -> Tensor:
        """All samples: the value has a gradient where the advantages are 0. bool [n]."""
        return torch.ones_like(advantage, dtype=torch.bool)

    def token_advantage(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """The whitened advantage of each token, [t]."""
        return tokens.estimates["advantage"]

    def token_factor(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """`actor_coef` of each token, [t]."""
        return torch.full_like(tokens.logprobs.detach(), self.options.actor_coef)

    def token_scores(self, tokens: TokenRecord) -> Tensor:
        """rho_t - kappa_t of each token, float64 [t]."""
        reference = required(tokens.reference_logprobs, "reference log-probs")
        return self._value(tokens.logprobs.double() - reference.double())

    def known(self, facts: SampleFacts, step_inputs: StepInputs) -> dict[str, Tensor]:
        """Adds `target`, R - mean, float64 [n]."""
        target = torch.from_numpy(step_inputs["target"])
        return super().known(facts, step_inputs) | {"target": target}

    def couple(
        self,
        table: SampleTable,
        scores: Tensor | None,
        sampler_ratios: Tensor | None,
        known: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Adds, float64 [m], `value_slope`, the derivative of L_V by each log-prob, and
        `value_loss`, the part of L_V of each token.
        """
        per_sample = super().couple(table, scores, sampler_ratios, known)
        residual = required(scores, "scores") - known["target"]
        share = residual / table.num_samples
        lens = table.response_lens.clamp(min=1.0)
        return per_sample | {
            "value_slope": self.options.beta * share,
            "value_loss": 0.5 * residual * share / lens,
        }

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """Each token's loss, [t]; its masked sum is the true loss."""
        dtype = tokens.logprobs.dtype
        slope = at_tokens(prepared.per_sample["value_slope"], tokens).to(dtype)
        value_loss = at_tokens(prepared.per_sample["value_loss"], tokens).to(dtype)
        zero = tokens.logprobs - tokens.logprobs.detach()
        return super().token_loss(tokens, prepared) + value_loss + slope * zero

    def prepare(
        self, scores: Tensor | None, facts: SampleFacts, step_inputs: StepInputs
    ) -> Prepared:
        """Same as `PolicyGradient`, with `vimpo/value_loss`, L_V."""
        prepared = super().prepare(scores, facts, step_inputs)
        lens = torch.from_numpy(facts.response_lens).clamp(min=1)
        value_loss = (prepared.per_sample["value_loss"] * lens).sum()
        prepared.metrics["vimpo/value_loss"] = float(value_loss)
        return prepared

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, Tensor]:
        """Those of `PolicyGradient`, and `vimpo/kl`, the mean of the estimated KL over the tokens;
        [t] each.
        """
        metrics = super().token_metrics(tokens, prepared)
        reference = required(tokens.reference_logprobs, "reference log-probs")
        kl = estimate_kl(self.options.value_kl, reference - tokens.logprobs)
        metrics["vimpo/kl"] = kl / tokens.response_lens.sum().clamp(min=1)
        return metrics

    def _value(self, log_ratio: Tensor) -> Tensor:
        """beta (log_ratio - KL) of log pi - log pi_reference, same shape."""
        return self.options.beta * (log_ratio - estimate_kl(self.options.value_kl, -log_ratio))
