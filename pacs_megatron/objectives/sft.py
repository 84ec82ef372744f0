"""Supervised fine-tuning: the mean negative log-likelihood of demonstrations, without groups."""

from typing import ClassVar, Literal

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.objectives.shared.base import CommonOptions, Objective, StepInputs, at_tokens
from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.policy_gradient import mean_weights


class SftOptions(CommonOptions):
    """Supervised fine-tuning on demonstrations."""

    compares_siblings: ClassVar[bool] = False
    trains_on_demonstrations: ClassVar[bool] = True

    name: Literal["sft"]
    """Name of the objective."""
    loss_mean: Literal["token", "sequence"] = "token"
    """Averaging of token losses.

    `token`: over all response tokens of the mini-batch; `sequence`: mean of response means.
    """


class Sft(Objective, options=SftOptions):
    """Maximum likelihood; see `Objective` for the protocol."""

    options: SftOptions

    def prepare(
        self, scores: Tensor | None, facts: SampleFacts, step_inputs: StepInputs
    ) -> Prepared:
        """Per sample, float64 [n]: `token_weight`, the weight of each of its tokens."""
        weights = mean_weights(facts.response_lens, self.options.loss_mean)
        return Prepared(per_sample={"token_weight": torch.from_numpy(weights)})

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """Each token's loss, [t], nats; its masked sum is the true loss."""
        weight = at_tokens(prepared.per_sample["token_weight"], tokens).to(tokens.logprobs.dtype)
        return -weight * tokens.logprobs
