"""CISPO (arXiv:2506.13585, MiniMax-M1, equations 4 and 5): clips a token's importance weight, but
never its gradient.

    l = -sg(min(rho, 1 + high)) A log pi_theta

per token, mean over all tokens of the mini-batch, A = (R - mean) / s in the group, no KL term. The
paper has no lower bound and does not state its upper bound. The default bounds rho at 5, the same
as ms-swift's `epsilon_high=5.0`.
"""

from typing import Literal

from pydantic import Field

from pacs_megatron.contracts import TokenRecord
from pacs_megatron.objectives.shared.lazy import Tensor
from pacs_megatron.objectives.shared.policy_gradient import PolicyGradient, TokenMeanOptions


class CispoOptions(TokenMeanOptions):
    """CISPO: policy gradient whose importance weights are clipped and have no gradient."""

    name: Literal["cispo"]
    """Name of the objective."""
    clip_high: float = Field(default=4.0, gt=0)
    """Upper bound 1 + clip_high of the probability ratio that weights a token."""


class Cispo(PolicyGradient, options=CispoOptions):
    """CISPO; see `PolicyGradient` for the arguments."""

    options: CispoOptions

    def surrogate(self, ratio: Tensor, advantage: Tensor, tokens: TokenRecord) -> Tensor:
        """l (equation 4) of each token, [t]."""
        weight = ratio.detach().clamp(max=1.0 + self.options.clip_high)
        return -weight * advantage * tokens.logprobs

    def is_clipped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """The tokens whose weight is the bound instead of the ratio, bool [t]."""
        return (ratio > 1.0 + self.options.clip_high) & (advantage != 0)
