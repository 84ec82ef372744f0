"""Dr. GRPO (arXiv:2503.20783): GRPO without the two divisions that bias it.

A = R - mean of the group, without its standard deviation. Token losses are summed and divided by a
constant, the response limit, instead of the response's length. Defaults: clip 0.2, no KL term.
"""

from typing import Literal

from pydantic import PositiveInt

from pacs_megatron.contracts import SampleFacts
from pacs_megatron.objectives.shared.groups import FloatArray
from pacs_megatron.objectives.shared.lazy import Tensor
from pacs_megatron.objectives.shared.policy_gradient import (
    ClippedOptions,
    PolicyGradient,
    mean_weights,
)
from pacs_megatron.objectives.shared.sample_table import SampleTable


class DrGrpoOptions(ClippedOptions):
    """Dr. GRPO: GRPO without the standard deviation and without the response's length as a
    divisor.
    """

    name: Literal["dr_grpo"]
    """Name of the objective."""
    constant_length: PositiveInt
    """Divisor of a response's summed token losses, in tokens: rollout.sampling.max_response_tokens.
    """


class DrGrpo(PolicyGradient, options=DrGrpoOptions):
    """Dr. GRPO; see `PolicyGradient` for the arguments."""

    options: DrGrpoOptions

    def advantages(self, rewards: Tensor, table: SampleTable) -> Tensor:
        """R - mean of the group, float64 [m]."""
        return table.centred(rewards)

    def token_weights(self, facts: SampleFacts, advantages: Tensor) -> FloatArray:
        """1/(N constant_length), float64 [n]."""
        return mean_weights(facts.response_lens, "dr_grpo", self.options.constant_length)
