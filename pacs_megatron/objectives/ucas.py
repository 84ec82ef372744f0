"""UCAS (arXiv:2510.10649): advantages shaped by the policy's certainty.

The certainty of a response is the sum over its tokens of KL(uniform || pi) up to a constant,

    C = sum_t (log sum_v exp z_v - mean_v z_v)

of the logits z. With its z-score c in the group and GRPO's advantage A = (R - mean) / (s + 1e-6),

    A' = A exp(-correct_coef c) if A > 0, else A exp(wrong_coef c)
    A_t = A' - logit_coef n_t, at least 0 if A' > 0

where n_t is the logit of the sampled token, scaled to [0, 1] over all tokens of the rollout batch.
The logits are those of the step's start, divided by the temperature, whose factor n_t does not
have. Surrogate and mean are GRPO's:

    l = -min(rho A_t, clip(rho, 1 - low, 1 + high) A_t)

per token, mean over all tokens of the mini-batch. The formulas and the defaults (0.25, 0.35, 0.05)
are those of xvolcano02/UCAS, commit b122ff2 (`compute_ucas_advantage` in
verl/trainer/ppo/core_algos.py).
"""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.objectives.shared.base import StepInputs, at_tokens, required
from pacs_megatron.objectives.shared.groups import build_table, by_row
from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.policy_gradient import (
    ClippedOptions,
    PolicyGradient,
    TokenMeanOptions,
)

EPSILON = 1e-6
"""of the authors, added to a deviation or a range"""


class UcasOptions(TokenMeanOptions, ClippedOptions):
    """UCAS: clipped policy gradient with advantages shaped by the policy's certainty."""

    needs_certainty: ClassVar[bool] = True

    name: Literal["ucas"]
    """Name of the objective."""
    correct_coef: float = Field(default=0.25, ge=0)
    """Less weight on a certain response with a positive advantage."""
    wrong_coef: float = Field(default=0.35, ge=0)
    """More weight on a certain response with a negative advantage."""
    logit_coef: float = Field(default=0.05, ge=0)
    """Punishment of the token with the largest logit of the rollout batch."""


class Ucas(PolicyGradient, options=UcasOptions):
    """UCAS; see `PolicyGradient` for the arguments."""

    options: UcasOptions

    def __init__(self, options: UcasOptions) -> None:
        super().__init__(options)
        self.passes["step_start"] = 0

    def prepare_step(self, facts: SampleFacts) -> StepInputs:
        """`advantage`: A'; `logit_scale` and `logit_shift` with n = scale (logit - shift)."""
        advantage = torch.from_numpy(super().prepare_step(facts)["advantage"])
        table = build_table(facts)
        certainty = torch.from_numpy(required(facts.certainty, "facts.certainty"))[table.rows]
        centred = table.centred(certainty)
        score = by_row(centred / (table.std(centred) + EPSILON)[table.group_of_sample], table)

        rise = torch.exp(self.options.wrong_coef * score)
        fall = torch.exp(-self.options.correct_coef * score)
        shaped = advantage * torch.where(advantage > 0.0, fall, rise)

        least = float(required(facts.logit_min, "facts.logit_min").min())
        largest = float(required(facts.logit_max, "facts.logit_max").max())
        scale = 1.0 / (largest - least + EPSILON)
        if np.isclose(largest, least):
            # The authors' rule: every token has n = 1/2.
            scale = 1e-12
            least -= 0.5 / scale
        num_samples = facts.num_samples
        return {
            "advantage": shaped.numpy(),
            "logit_scale": np.full(num_samples, scale),
            "logit_shift": np.full(num_samples, least),
        }

    def has_gradient(self, advantage: Tensor) -> Tensor:
        """All samples: a logit is punished where the advantage is 0, too. bool [n]."""
        return torch.ones_like(advantage, dtype=torch.bool)

    def known(self, facts: SampleFacts, step_inputs: StepInputs) -> dict[str, Tensor]:
        """Adds `logit_scale` and `logit_shift`, float64 [n]."""
        names = ("logit_scale", "logit_shift")
        scales = {name: torch.from_numpy(step_inputs[name]) for name in names}
        return super().known(facts, step_inputs) | scales

    def token_advantage(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """A_t of each token, [t]."""
        shaped = super().token_advantage(tokens, prepared)
        scale = at_tokens(prepared.per_sample["logit_scale"], tokens)
        shift = at_tokens(prepared.per_sample["logit_shift"], tokens)
        punished = shaped - self.options.logit_coef * scale * (tokens.estimates["logit"] - shift)
        return torch.where(shaped > 0.0, punished.clamp(min=0.0), punished)
