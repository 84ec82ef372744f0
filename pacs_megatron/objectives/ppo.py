"""PPO with a critic (arXiv:1707.06347; advantages: GAE, arXiv:1506.02438).

delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum_{l >= 0} (gamma lam)^l delta_{t+l}, return G_t = A_t
+ V_t. V_t is the critic's value before response token t, with the step-start weights. The value
after the last token is 0, also for a truncated response, because the length limit is a part of the
task. r_t is the verifier's reward at the last token; `kl_in: reward` subtracts kl_coef * k_t at
each token. A is whitened over all tokens of the rollout batch, (A - mean) / sqrt(var + 1e-8) with
the unbiased variance; G is not. Policy: -min(rho A, clip(rho, 0.8, 1.2) A) per token. Critic: 0.5
max((V - G)^2, (clip(V, V_start - c, V_start + c) - G)^2) per token, with the mean of `loss_mean`.

The formulas are those of the authors' baseline, verl's core_algos.py
(`compute_gae_advantage_return`, `compute_value_loss`) and torch_functional.py (`masked_whiten`);
TRL's PPOTrainer has the same GAE. Defaults gamma = lam = 1, c = 0.5 and the critic's rate 1e-5 are
those of verl and of the authors' script (ritzz-ai/PACS, scripts/baseline/ppo.sh), which sets 1e-5
and no KL term. Its mean, `seq-mean-token-sum-norm` over 4,096 tokens, is `loss_mean: dr_grpo`. TRL
has lam = 0.95, c = 0.2.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.contracts.options import Options
from pacs_megatron.objectives.shared.base import Objective, at_tokens, given
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
    critic: CriticOptions = CriticOptions()
    """The critic."""

    @model_validator(mode="after")
    def _refuse_estimates_of_kl(self) -> Self:
        if self.kl_in == "reward" and self.kl_estimator != "k1":
            raise ValueError(
                f"objective.kl_estimator={self.kl_estimator} with kl_in=reward does not go with "
                "objective.name=ppo: only k1 is an unbiased estimate of each token's KL; use k1, "
                "or kl_in=loss"
            )
        return self


class Ppo(PolicyGradient, options=PpoOptions):
    options: PpoOptions

    def __init__(self, options: PpoOptions) -> None:
        super().__init__(options)
        # in the rewards of `estimate`
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
        """(advantages before whitening, returns) of samples, float64 [response] each.

        The log-probs (the last two arguments) are empty without a KL in the reward.
        """
        per_token = [np.zeros(len(value)) for value in values]
        for row, (own, reward) in enumerate(zip(per_token, rewards, strict=True)):
            if self.has_token_kl:
                own -= self.options.kl_coef * (
                    step_starts[row].astype(np.float64) - references[row]
                )
            own[-1] += reward
        advantages = gae(per_token, values, self.options.gamma, self.options.lam)
        return advantages, [a + v for a, v in zip(advantages, values, strict=True)]

    def prepare_step(self, facts: SampleFacts) -> dict[str, float]:
        """Mean |A| of each sample id, from the engine."""
        return dict(
            zip(facts.ids, given(facts.advantage_abs, "facts.advantage_abs").tolist(), strict=True)
        )

    def token_advantage(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        return tokens.estimates["advantage"]


class ValueLoss(Objective):
    """The critic's objective. A record's `logprobs` are values."""

    name = "critic"
    options: PpoOptions

    def prepare(self, scores: Tensor | None, facts: SampleFacts, step_inputs: Any) -> Prepared:
        """Per sample [n] float64: `token_weight`, the weight of each of its tokens."""
        weights = mean_weights(
            facts.response_lens, self.options.loss_mean, self.options.constant_length
        )
        return Prepared(per_sample={"token_weight": torch.from_numpy(weights)})

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """[t]; its masked sum is the true loss."""
        weight = at_tokens(prepared.per_sample["token_weight"], tokens).to(tokens.logprobs.dtype)
        loss = (tokens.logprobs - tokens.estimates["return"]).square()
        if self.options.value_clip is not None:
            loss = torch.maximum(
                loss, (self._clipped(tokens) - tokens.estimates["return"]).square()
            )
        return 0.5 * weight * loss

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, Tensor]:
        """Sums over tokens for `explained_variance`, and `clip_frac`, the share of tokens with a
        clipped loss.
        """
        returns = tokens.estimates["return"].double()
        error = returns - tokens.logprobs
        clipped = torch.zeros_like(returns)
        if self.options.value_clip is not None:
            clipped = ((self._clipped(tokens) - returns).square() > error.square()).double()
        sums = {
            "return": returns,
            "return_square": returns.square(),
            "error": error,
            "error_square": error.square(),
        }
        num_tokens = tokens.response_lens.sum().clamp(min=1)
        return {f"sum/{name}": values for name, values in sums.items()} | {
            "critic/clip_frac": clipped / num_tokens
        }

    def _clipped(self, tokens: TokenRecord) -> Tensor:
        """[t], V clipped to V_start +- value_clip, without gradient outside."""
        start = tokens.estimates["value"]
        bound = self.options.value_clip
        assert bound is not None
        return torch.minimum(torch.maximum(tokens.logprobs, start - bound), start + bound)


def gae(
    rewards: Sequence[FloatArray], values: Sequence[FloatArray], gamma: float, lam: float
) -> list[FloatArray]:
    """A_t of every token, float64 [response] each."""
    lens = [len(value) for value in values]
    width = max(lens, default=0)
    delta = np.zeros((len(values), width))  # right-aligned: every last token is in the last column
    for row, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        following = np.append(value[1:].astype(np.float64), 0.0)
        delta[row, width - lens[row] :] = reward + gamma * following - value
    for column in range(width - 2, -1, -1):
        delta[:, column] += gamma * lam * delta[:, column + 1]
    return [delta[row, width - length :] for row, length in enumerate(lens)]
