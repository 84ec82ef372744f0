"""PPO with a critic (arXiv:1707.06347; advantages: GAE, arXiv:1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t = sum_{l >= 0} (gamma lam)^l delta_{t+l}         (GAE, equation 16)
    return G_t = A_t + V_t

V_t is the critic's value before response token t, with the step-start weights. The value after the
last token is 0, also for a truncated response, because the length limit is a part of the task. r_t
is the verifier's reward at the last token; `kl_in: reward` subtracts kl_coef * k_t at each token. A
is whitened over all tokens of the rollout batch, (A - mean) / sqrt(var + 1e-8) with the unbiased
variance; G is not. Policy: -min(rho A, clip(rho, 0.8, 1.2) A) per token. Critic: value_coef max((V
- G)^2, (clip(V, V_start - c, V_start + c) - G)^2) per token, with the mean of `loss_mean`.

The formulas are those of the authors' baseline, verl's core_algos.py
(`compute_gae_advantage_return`, `compute_value_loss`) and torch_functional.py (`masked_whiten`);
TRL's PPOTrainer has the same GAE. Defaults gamma = lam = 1, c = 0.5 and the critic's rate 1e-5 are
those of verl and of the authors' script (ritzz-ai/PACS, scripts/baseline/ppo.sh), which sets 1e-5
and no KL term. Its mean, `seq-mean-token-sum-norm` over 4,096 tokens, is `loss_mean: dr_grpo`.
value_coef = 0.5 is the factor of TRL and of verl since; the authors' copy of verl has none, so 1.
TRL has lam = 0.95, c = 0.2.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.contracts.options import Options
from pacs_megatron.objectives.shared.base import Objective, StepInputs, at_tokens, required
from pacs_megatron.objectives.shared.groups import FloatArray
from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.policy_gradient import (
    ClippedOptions,
    PolicyGradient,
    TokenMeanOptions,
    mean_weights,
)


class CriticOptions(Options):
    """The critic: a model of the policy's architecture and layout, with a value head instead of the
    output layer.
    """

    path: str | None = Field(default=None, min_length=1)
    """Folder or hub id of the critic's initial weights: a token-classification model with one
    label, such as `critic_hf` of a run, or a model without a value head, whose values start at 0.
    null: the policy's initial weights.
    """
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic.

    All other options are those of `optimizer`; min_lr has the same ratio to lr.
    """
    warmup_steps: int = Field(default=0, ge=0)
    """Number of first steps that update the critic only."""


class PpoOptions(TokenMeanOptions, ClippedOptions):
    """PPO: clipped policy gradient with the advantages of a critic."""

    compares_siblings: ClassVar[bool] = False

    name: Literal["ppo"]
    """Name of the objective."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of GAE: 1 compares the value with the whole remaining reward, 0 with the next value.
    """
    value_clip: float | None = Field(default=0.5, gt=0)
    """Bound of a value's distance from the value at the step's start, in units of the reward; null:
    no bound.
    """
    value_coef: float = Field(default=0.5, gt=0)
    """Factor of the critic's squared error. Adam removes it, except in the clipping of the critic's
    gradient at `clip_grad` and in `optimizer.adam_eps`.
    """
    critic: CriticOptions = CriticOptions()
    """The critic."""

    @property
    def other_models(self) -> dict[str, str]:
        path = self.critic.path
        return {} if path is None else {"objective.critic.path": path}

    @model_validator(mode="after")
    def _check_kl_estimator(self) -> Self:
        if self.kl_in == "reward" and self.kl_estimator != "k1":
            raise ValueError(
                f"objective.kl_estimator={self.kl_estimator} with kl_in=reward does not go with "
                "objective.name=ppo: only k1 "
                "is an unbiased estimate of each token's KL; use k1, or kl_in=loss"
            )
        return self


class Ppo(PolicyGradient, options=PpoOptions):
    """The policy's objective; see `PolicyGradient` for the arguments."""

    options: PpoOptions
    has_estimates = True

    def __init__(self, options: PpoOptions) -> None:
        super().__init__(options)
        # The KL is a part of each token's reward in `estimate`, not of the sample's reward in
        # `prepare_step`.
        self.has_token_kl = self.kl_in_reward
        self.kl_in_reward = False
        self.passes["value"] = 0
        self.critic = ValueLoss(options)

    def estimate(
        self,
        rewards: Sequence[float],
        values: Sequence[FloatArray],
        step_starts: Sequence[FloatArray],
        references: Sequence[FloatArray],
    ) -> tuple[list[FloatArray], list[FloatArray]]:
        """Advantages by GAE, before whitening, and returns.

        Args:
            rewards: the verifier's, of each sample.
            values: [response] each, V.
            step_starts: [response] each, log-probs; empty without a KL in the reward.
            references: [response] each, log-probs; empty without a KL in the reward.

        Returns:
            (advantages, returns), float64 [response] each.
        """
        token_rewards = [np.zeros(len(value)) for value in values]
        for row, (of_tokens, reward) in enumerate(zip(token_rewards, rewards, strict=True)):
            if self.has_token_kl:
                kl = step_starts[row].astype(np.float64) - references[row]
                of_tokens -= self.options.kl_coef * kl
            of_tokens[-1] += reward

        advantages = gae(token_rewards, values, self.options.gamma, self.options.lam)
        returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
        return advantages, returns

    def prepare_step(self, facts: SampleFacts) -> StepInputs:
        """`advantage`: mean |A| of each sample, from the engine."""
        return {"advantage": required(facts.advantage_abs, "facts.advantage_abs")}

    def token_advantage(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """The whitened advantage of each token, [t]."""
        return tokens.estimates["advantage"]


class ValueLoss(Objective):
    """The critic's objective. A record's `logprobs` are values."""

    name = "critic"
    options: PpoOptions

    def prepare(
        self, scores: Tensor | None, facts: SampleFacts, step_inputs: StepInputs
    ) -> Prepared:
        """Per sample, float64 [n]: `token_weight`, the weight of each of its tokens."""
        weights = mean_weights(
            facts.response_lens, self.options.loss_mean, self.options.constant_length
        )
        return Prepared(per_sample={"token_weight": torch.from_numpy(weights)})

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """Each token's loss, [t]; its masked sum is the true loss."""
        weight = at_tokens(prepared.per_sample["token_weight"], tokens).to(tokens.logprobs.dtype)
        returns = tokens.estimates["return"]
        loss = (tokens.logprobs - returns).square()
        if self.options.value_clip is not None:
            clipped_loss = (self._clipped(tokens) - returns).square()
            loss = torch.maximum(loss, clipped_loss)
        return self.options.value_coef * weight * loss

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, Tensor]:
        """Each token's part of the sums of `explained_variance`, and of `clip_frac`, the share of
        tokens with a clipped loss; [t] each.
        """
        returns = tokens.estimates["return"].double()
        error = returns - tokens.logprobs
        is_clipped = torch.zeros_like(returns)
        if self.options.value_clip is not None:
            clipped_error = self._clipped(tokens) - returns
            is_clipped = (clipped_error.square() > error.square()).double()

        num_tokens = tokens.response_lens.sum().clamp(min=1)
        return {
            "sum/return": returns,
            "sum/return_square": returns.square(),
            "sum/error": error,
            "sum/error_square": error.square(),
            "critic/clip_frac": is_clipped / num_tokens,
        }

    def _clipped(self, tokens: TokenRecord) -> Tensor:
        """V clipped to V_start +- value_clip, [t], without gradient outside."""
        start = tokens.estimates["value"]
        bound = self.options.value_clip
        assert bound is not None
        return tokens.logprobs.clamp(start - bound, start + bound)


def gae(
    rewards: Sequence[FloatArray], values: Sequence[FloatArray], gamma: float, lam: float
) -> list[FloatArray]:
    """A_t of every token (GAE, equation 16), by its recursion from the last token backwards.

    Args:
        rewards: [response] each, r.
        values: [response] each, V.
        gamma: discount.
        lam: lambda.

    Returns:
        float64 [response] each.
    """
    lens = [len(value) for value in values]
    width = max(lens, default=0)

    # Right-aligned: every last token is in the last column, so one loop serves all samples.
    advantages = np.zeros((len(values), width))
    for row, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        next_value = np.append(value[1:].astype(np.float64), 0.0)
        advantages[row, width - lens[row] :] = reward + gamma * next_value - value

    for column in range(width - 2, -1, -1):
        advantages[:, column] += gamma * lam * advantages[:, column + 1]
    return [advantages[row, width - length :] for row, length in enumerate(lens)]
