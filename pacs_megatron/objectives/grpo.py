"""GRPO (arXiv:2402.03300, equations 3 and 4). Its variants are in separate files.

    l = -min(rho A, clip(rho, 1 - low, 1 + high) A)

per token, mean over all tokens of the mini-batch (the paper's mean of sequence means is
`loss_mean: sequence`), A = (R - mean) / (s + 1e-6) in the group, with the unbiased s. Defaults:
clip 0.2; the paper's KL term is `kl_coef: 0.04`.
"""

from typing import Literal

from pacs_megatron.objectives.shared.policy_gradient import (
    ClippedOptions,
    PolicyGradient,
    TokenMeanOptions,
)


class GrpoOptions(TokenMeanOptions, ClippedOptions):
    """GRPO: clipped policy gradient with group-relative advantages."""

    name: Literal["grpo"]
    """Name of the objective."""


class Grpo(PolicyGradient, options=GrpoOptions):
    """The defaults of PolicyGradient are GRPO's."""
