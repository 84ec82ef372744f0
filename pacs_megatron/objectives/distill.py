"""On-policy distillation: the policy's own samples, scored by a frozen teacher.

    A_t = log pi_teacher - log pi_step_start + label_coef * A

of token t, where A is GRPO's advantage (R - mean) / (s + 1e-6) in the group. Surrogate and mean are
GRPO's:

    l = -min(rho A_t, clip(rho, 1 - low, 1 + high) A_t)

per token, mean over all tokens of the mini-batch. In a step's first update rho is 1, and the
expected gradient of the first two terms over the policy's next token is that of KL(pi_theta ||
pi_teacher), because log pi_theta has the mean gradient 0. A token gets the KL of its own position
only (a discount of 0), as in GKD (arXiv:2306.13649, reverse KL, lambda = 1), whose sum over the
vocabulary is sampled here. The form as an advantage with an importance ratio is that of Thinking
Machines, "On-Policy Distillation" (2025), equal to the one-token part of MiniLLM's policy gradient
(arXiv:2306.08543, equation 4). Defaults: label_coef 0, clip 0.2.

The teacher takes the place of the frozen reference: its weights are in host memory and are in the
model for one forward-only pass a mini-batch. So it has the architecture of the policy.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from pacs_megatron.contracts import Prepared, TokenRecord
from pacs_megatron.objectives.shared.base import required
from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.policy_gradient import (
    ClippedOptions,
    PolicyGradient,
    TokenMeanOptions,
)
from pacs_megatron.objectives.shared.sample_table import SampleTable


class DistillOptions(TokenMeanOptions, ClippedOptions):
    """On-policy distillation: clipped policy gradient whose advantages come from a teacher."""

    name: Literal["distill"]
    """Name of the objective."""
    teacher: str = Field(min_length=1)
    """Folder or hub id of the teacher: a model of the policy's architecture and vocabulary."""
    label_coef: float = Field(default=0.0, ge=0)
    """Weight of GRPO's advantage beside the teacher's; 0: the rewards do not train."""

    @property
    def compares_siblings(self) -> bool:  # type: ignore[override]
        return self.label_coef > 0

    @property
    def other_models(self) -> dict[str, str]:
        return {"objective.teacher": self.teacher}

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        if self.kl_coef > 0:
            raise ValueError(
                f"objective.kl_coef={self.kl_coef} does not go with objective.name=distill, whose "
                "teacher takes the place of the frozen reference; remove it"
            )
        return self


class Distill(PolicyGradient, options=DistillOptions):
    """On-policy distillation; see `PolicyGradient` for the arguments."""

    options: DistillOptions

    def __init__(self, options: DistillOptions) -> None:
        super().__init__(options)
        self.passes["reference"] = 0

    def advantages(self, rewards: Tensor, table: SampleTable) -> Tensor:
        """label_coef A, the part of the labels, float64 [m]."""
        if self.options.label_coef == 0:
            return torch.zeros_like(rewards)
        return self.options.label_coef * super().advantages(rewards, table)

    def has_gradient(self, advantage: Tensor) -> Tensor:
        """All samples: the teacher's part differs from 0 where the labels' part is 0. bool [n]."""
        return torch.ones_like(advantage, dtype=torch.bool)

    def token_advantage(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """A_t of each token, [t], without gradient."""
        start = self._step_start(tokens).detach()
        return super().token_advantage(tokens, prepared) + self._teacher(tokens) - start

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, Tensor]:
        """Those of `PolicyGradient`, and `distill/kl`, the mean over the tokens of log pi_theta -
        log pi_teacher; [t] each.
        """
        metrics = super().token_metrics(tokens, prepared)
        num_tokens = tokens.response_lens.sum().clamp(min=1)
        metrics["distill/kl"] = (tokens.logprobs - self._teacher(tokens)) / num_tokens
        return metrics

    def _teacher(self, tokens: TokenRecord) -> Tensor:
        """log pi_teacher, [t], nats."""
        return required(tokens.reference_logprobs, "the teacher's log-probs")
