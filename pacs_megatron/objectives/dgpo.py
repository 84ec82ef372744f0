"""DGPO: GRPO with equal total advantages and more weight on difficult prompts.

Of the groups with different rewards in the rollout batch, number g with accuracy p_g (the mean
label; 1 where no label is 1):

    A = G (R - mean) / (sum |R - mean| + 1e-4)
        * tokens of all groups / tokens of these groups
        * number of these groups * softmax over g (-p_g / temperature)

A of the other groups is 0. The formula is that of AMAP-ML/MathForge, commit 83edda0
(trl-0.20.0/trl/trainer/grpo_trainer.py, `enable_dgpo`), with its default temperature 2. The second
factor makes the mean over all tokens one over the tokens of these groups. Surrogate and mean are
GRPO's:

    l = -min(rho A, clip(rho, 1 - low, 1 + high) A)

per token, mean over all tokens of the mini-batch. Defaults: clip 0.2, no KL term. The authors
compute one update from a rollout batch; with more updates a step the factors are those of the whole
rollout batch.
"""

from typing import Literal

from pydantic import Field

from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.policy_gradient import (
    ClippedOptions,
    PolicyGradient,
    TokenMeanOptions,
)
from pacs_megatron.objectives.shared.sample_table import SampleTable

EPSILON = 1e-4
"""of the authors"""


class DgpoOptions(TokenMeanOptions, ClippedOptions):
    """DGPO: clipped policy gradient with balanced advantages and weights by difficulty."""

    name: Literal["dgpo"]
    """Name of the objective."""
    difficulty_temperature: float | None = Field(default=2.0, gt=0)
    """Temperature of the softmax over the groups' accuracies; null: no weights by difficulty."""


class Dgpo(PolicyGradient, options=DgpoOptions):
    """DGPO; see `PolicyGradient` for the arguments."""

    options: DgpoOptions

    def advantages(self, rewards: Tensor, table: SampleTable) -> Tensor:
        """A of the whole rollout batch, float64 [m]."""
        centred = table.centred(rewards)
        spread = table.total(centred.abs())
        balanced = centred * (table.sizes / (spread + EPSILON))[table.group_of_sample]

        is_mixed = spread > 0.0
        if not bool(is_mixed.any()):
            return balanced

        num_tokens = table.total(table.response_lens)
        share = num_tokens.sum() / num_tokens[is_mixed].sum()
        return balanced * share * self._difficulty(table, is_mixed)[table.group_of_sample]

    def _difficulty(self, table: SampleTable, is_mixed: Tensor) -> Tensor:
        """The weight of each group, float64 [g]; of mean 1 over the groups with `is_mixed`."""
        weights = torch.ones_like(table.sizes)
        temperature = self.options.difficulty_temperature
        if temperature is None:
            return weights

        accuracy = table.total(table.labels) / table.sizes
        # The authors' rule: a group without a correct response weighs as the easiest one.
        accuracy = torch.where(accuracy == 0.0, 1.0, accuracy)[is_mixed]
        weights[is_mixed] = len(accuracy) * torch.softmax(-accuracy / temperature, 0)
        return weights
