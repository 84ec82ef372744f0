"""RLOO (arXiv:2402.14740): REINFORCE on whole responses with the siblings' mean as the baseline.

A = R - mean of the siblings. At the first update of a step the loss is the paper's, -A log pi(o) (a
sum over tokens), mean over samples. Later updates use -min(s A, clip(s, 0.8, 1.2) A) with s =
pi_theta(o) / pi_step_start(o), the product over all tokens, the same as TRL's RLOOTrainer. The
paper's KL term is `kl_in: reward` with k1 (TRL: kl_coef 0.05). The default here is 0, because
verifiable labels need no reference.
"""

from typing import ClassVar, Literal

from pacs_megatron.contracts import SampleFacts
from pacs_megatron.objectives.shared.groups import FloatArray
from pacs_megatron.objectives.shared.lazy import Tensor
from pacs_megatron.objectives.shared.policy_gradient import (
    ClippedOptions,
    PolicyGradient,
    leave_one_out,
    mean_weights,
)
from pacs_megatron.objectives.shared.sample_table import SampleTable


class RlooOptions(ClippedOptions):
    """RLOO: policy gradient on whole responses with a leave-one-out baseline."""

    name: Literal["rloo"]
    """Name of the objective."""


class Rloo(PolicyGradient, options=RlooOptions):
    """RLOO; see `PolicyGradient` for the arguments."""

    ratio_of: ClassVar[Literal["product"]] = "product"

    def advantages(self, rewards: Tensor, table: SampleTable) -> Tensor:
        """R - mean of the siblings, float64 [m]."""
        return leave_one_out(rewards, table)

    def token_weights(self, facts: SampleFacts, advantages: Tensor) -> FloatArray:
        """1/(N |o|), float64 [n], because the gradient of rho, a product over tokens, has the
        factor |o|.
        """
        return mean_weights(facts.response_lens, "sequence")
