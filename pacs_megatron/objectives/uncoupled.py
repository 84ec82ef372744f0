"""Objectives whose coefficients are known before the update: they depend on no other sample's log-probs."""

from torch import Tensor

from pacs_megatron.contracts import SampleTable, TokenRecord
from pacs_megatron.contracts.protocols import Coupling, Statistic


class UncoupledObjective:
    """The part of `contracts.Objective` on statistics, for objectives that need none."""

    coupling: Coupling = "token"

    def statistics(self, update_index: int) -> frozenset[Statistic]:
        return frozenset()

    def token_scores(self, tokens: TokenRecord) -> Tensor:
        """Raises ValueError: no statistic is declared."""
        raise ValueError(f"objective: {type(self).__name__} has no scores")

    def couple(self, table: SampleTable, scores: Tensor | None, sampler_ratios: Tensor | None) -> dict[str, Tensor]:
        """Raises ValueError: no statistic is declared."""
        raise ValueError(f"objective: {type(self).__name__} has no coupling")
