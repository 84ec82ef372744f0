"""REINFORCE++ and its baseline variant (arXiv:2501.03262): advantages scaled over the whole rollout
batch.

REINFORCE++: A = (R - m) / sd, m and sd over all tokens of the rollout batch (each token has its
sample's R). With `baseline: group` first R - mean of the group (REINFORCE++-baseline).

    l = -min(rho A, clip(rho, 0.8, 1.2) A)

per token, mean over all tokens. The formulas are those of the authors' code, OpenRLHF's
models/loss.py and experience_maker.py; the latter weights samples by their tokens and uses the
biased variance, at least 1e-8. Its KL terms are `kl_in: reward` with k1 (REINFORCE++; it sums from
each token on, here the sum is over the whole response, with the same mean gradient) and `kl_in:
loss` with k2 (the baseline variant). Its `kl_coef` is 0.01; here it is 0, because verifiable labels
need no reference.
"""

from typing import Literal

from pacs_megatron.objectives.shared.lazy import Tensor
from pacs_megatron.objectives.shared.policy_gradient import (
    ClippedOptions,
    PolicyGradient,
    TokenMeanOptions,
)
from pacs_megatron.objectives.shared.sample_table import SampleTable


class ReinforcePpOptions(TokenMeanOptions, ClippedOptions):
    """REINFORCE++: clipped policy gradient with advantages scaled over the rollout batch."""

    name: Literal["reinforce_pp"]
    """Name of the objective."""
    baseline: Literal["none", "group"] = "none"
    """Baseline before the scaling over the batch.

    `group`: the mean reward of the group (REINFORCE++-baseline).
    """

    @property
    def compares_siblings(self) -> bool:  # type: ignore[override]
        return self.baseline == "group"


class ReinforcePp(PolicyGradient, options=ReinforcePpOptions):
    """REINFORCE++; see `PolicyGradient` for the arguments."""

    options: ReinforcePpOptions

    def advantages(self, rewards: Tensor, table: SampleTable) -> Tensor:
        """(R - m) / sd over all tokens of the rollout batch, float64 [m]."""
        shifted = rewards if self.options.baseline == "none" else table.centred(rewards)
        share = table.response_lens / table.response_lens.sum().clamp(min=1.0)

        centred = shifted - (shifted * share).sum()
        variance = (centred.square() * share).sum()
        return centred / variance.clamp(min=1e-8).sqrt()
