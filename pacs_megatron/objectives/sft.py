"""Supervised fine-tuning: the mean negative log-likelihood of demonstrations. Groups have no effect."""

from typing import Any

import torch

from pacs_megatron.config.objective_options import SftOptions
from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.contracts.protocols import LogprobSource
from pacs_megatron.objectives.lookup import at_tokens
from pacs_megatron.objectives.means import mean_weights
from pacs_megatron.objectives.uncoupled import UncoupledObjective


class Sft(UncoupledObjective):
    """Maximum likelihood; see `contracts.Objective` for the protocol."""

    name = "sft"

    def __init__(self, options: SftOptions) -> None:
        self._options = options

    def logprob_passes(self, update_index: int) -> frozenset[LogprobSource]:
        return frozenset()

    def prepare_step(self, facts: SampleFacts) -> None:
        """Nothing: SFT uses the mini-batch only."""

    def prepare(self, scores: torch.Tensor | None, facts: SampleFacts, step_inputs: Any) -> Prepared:
        """Per sample [n] float64: `token_weight`, the weight of each of its tokens."""
        weights = mean_weights(facts.response_lens, self._options.loss_mean)
        return Prepared(per_sample={"token_weight": torch.from_numpy(weights)})

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> torch.Tensor:
        """[t]; its masked sum is the true loss, nats."""
        weight = at_tokens(prepared.per_sample["token_weight"], tokens).to(tokens.logprobs.dtype)
        return -weight * tokens.logprobs

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, torch.Tensor]:
        return {}
