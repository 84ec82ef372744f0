"""GRPO (arXiv:2402.03300, equations 3 and 4), with the options of its relatives. Its rivals are files of their own.

l = -min(rho A, clip(rho, 1 - low, 1 + high) A) per token, mean over all tokens of the mini-batch (the paper's mean of
sequence means is `loss_mean: sequence`), A = (R - mean) / (s + 1e-6) in the group, with the unbiased s. Defaults: clip 0.2;
the paper's KL term is `kl_coef: 0.04`.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from pacs_megatron.contracts import SampleTable
from pacs_megatron.objectives.shared.lazy import Tensor
from pacs_megatron.objectives.shared.policy_gradient import (
    ClippedOptions,
    PolicyGradient,
    TokenMeanOptions,
    leave_one_out,
    standardised,
)


class GrpoOptions(TokenMeanOptions, ClippedOptions):
    """GRPO: clipped policy gradient with group-relative advantages."""

    name: Literal["grpo"]
    """Name of the objective."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Advantage of a sample in its group. `grpo`: (R - mean) / std; `dr_grpo`: R - mean; `rloo`: leave one out."""
    advantage_eps: float | None = Field(
        default_factory=lambda given: 1e-6 if given["advantage"] == "grpo" else None, gt=0
    )
    """Constant added to the standard deviation of `advantage: grpo`; default 1e-6."""

    @model_validator(mode="after")
    def _refuse_unused_eps(self) -> Self:
        self.refuse_unused("advantage_eps", is_used=self.advantage == "grpo", by=f"advantage={self.advantage}")
        return self


class Grpo(PolicyGradient, options=GrpoOptions):
    """See the file."""

    options: GrpoOptions

    def advantages(self, rewards: Tensor, table: SampleTable) -> Tensor:
        match self.options.advantage:
            case "dr_grpo":
                return table.centred(rewards)
            case "rloo":
                return leave_one_out(rewards, table)
            case "grpo":
                assert self.options.advantage_eps is not None
                return standardised(rewards, table, self.options.advantage_eps)
