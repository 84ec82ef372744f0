"""MaxRL: a policy gradient of the logarithm of the success rate.

    A = (R - mean) / (mean + 1e-6)

in the group. With rewards 0 and 1 the mean is the success rate p of the prompt, and the gradient of
log p is that of p divided by p: a prompt that the policy rarely solves weighs more. The formula is
that of tajwarfahim/maxrl, commit c0698eb (`compute_maxrl_outcome_advantage` in
verl/trainer/ppo/core_algos.py). Surrogate and mean are GRPO's:

    l = -min(rho A, clip(rho, 1 - low, 1 + high) A)

per token, mean over all tokens of the mini-batch. Defaults: clip 0.2, no KL term.
"""

from typing import Literal, Self

import numpy as np
from pydantic import model_validator

from pacs_megatron.contracts import SampleFacts
from pacs_megatron.errors import RewardError
from pacs_megatron.objectives.shared.groups import FloatArray
from pacs_megatron.objectives.shared.lazy import Tensor
from pacs_megatron.objectives.shared.policy_gradient import (
    ClippedOptions,
    PolicyGradient,
    TokenMeanOptions,
)
from pacs_megatron.objectives.shared.sample_table import SampleTable

EPSILON = 1e-6
"""of the authors; without a correct response A is 0 / EPSILON = 0"""


class MaxRLOptions(TokenMeanOptions, ClippedOptions):
    """MaxRL: clipped policy gradient with advantages divided by the group's mean reward."""

    name: Literal["maxrl"]
    """Name of the objective."""

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        if self.kl_in == "reward":
            raise ValueError(
                "objective.kl_in=reward does not go with objective.name=maxrl: it divides by the "
                "mean reward, which the KL may make 0 or negative; use kl_in=loss"
            )
        return self


class MaxRL(PolicyGradient, options=MaxRLOptions):
    """MaxRL; see `PolicyGradient` for the arguments."""

    options: MaxRLOptions

    def rewards(self, facts: SampleFacts) -> FloatArray:
        """R, float64 [n].

        Raises:
            RewardError: a negative reward; the mean is no success rate then.
        """
        rewards = super().rewards(facts)
        negative = np.flatnonzero(rewards < 0.0)
        if len(negative):
            raise RewardError(
                f"reward of sample {facts.ids[negative[0]]} is {rewards[negative[0]]}; "
                "objective.name=maxrl divides by the group's mean reward, so it expects rewards of "
                "0 or more; let the reward of an incorrect response be 0"
            )
        return rewards

    def advantages(self, rewards: Tensor, table: SampleTable) -> Tensor:
        """(R - mean) / (mean + 1e-6) in the group, float64 [m]."""
        mean = table.total(rewards) / table.sizes
        return table.centred(rewards) / (mean + EPSILON)[table.group_of_sample]
