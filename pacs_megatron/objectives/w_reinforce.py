"""W-REINFORCE, PSR and NSR (arXiv:2506.01347): different weights for correct and incorrect
responses.

W-REINFORCE: A = positive_weight on correct samples and -1 on incorrect ones. `classes: positive`
(PSR) trains on correct samples only, with A = 1. `negative` (NSR) trains on incorrect samples only,
with A = -1.

    l = -min(rho A, clip(rho, 0.8, 1.2) A)

per token, mean over the trained samples' tokens. The other samples have no term at all: no KL, no
entropy. Defaults: positive_weight 0.1, no KL term. The formulas are those of
TianHongZXY/RLVR-Decomposed (`compute_psr_nsr_outcome_advantage`), whose ray_trainer.py cuts the
batch to the trained samples before the loss.
"""

from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from pacs_megatron.contracts import SampleFacts
from pacs_megatron.objectives.shared.groups import FloatArray
from pacs_megatron.objectives.shared.lazy import Tensor
from pacs_megatron.objectives.shared.policy_gradient import ClippedOptions, PolicyGradient
from pacs_megatron.objectives.shared.sample_table import SampleTable


class WReinforceOptions(ClippedOptions):
    """W-REINFORCE: small weight on correct responses, full weight on incorrect ones.

    PSR and NSR train on one class.
    """

    compares_siblings: ClassVar[bool] = False

    name: Literal["w_reinforce"]
    """Name of the objective."""
    classes: Literal["both", "positive", "negative"] = "both"
    """Classes of the trained samples. `both`: W-REINFORCE; `positive`: PSR; `negative`: NSR."""
    positive_weight: float | None = Field(
        default_factory=lambda options: 0.1 if options["classes"] == "both" else None, gt=0
    )
    """Advantage of correct samples with `classes: both`; default 0.1."""

    @model_validator(mode="after")
    def _check_classes(self) -> Self:
        by_classes = f"classes={self.classes}"
        self.check_used("positive_weight", is_used=self.classes == "both", by=by_classes)
        if self.kl_in == "reward":
            raise ValueError(
                "objective.kl_in=reward does not go with objective.name=w_reinforce: its "
                "advantages are the labels', no reward enters; use kl_in=loss"
            )
        return self


class WReinforce(PolicyGradient, options=WReinforceOptions):
    """W-REINFORCE, PSR and NSR; see `PolicyGradient` for the arguments."""

    options: WReinforceOptions

    def advantages(self, rewards: Tensor, table: SampleTable) -> Tensor:
        """The weight of each sample's class, float64 [m]; does not read the rewards."""
        positive = self.options.positive_weight or 1.0
        negative = -1.0
        match self.options.classes:
            case "positive":
                negative = 0.0
            case "negative":
                positive = 0.0
        return table.labels * positive + (1.0 - table.labels) * negative

    def token_weights(self, facts: SampleFacts, advantages: Tensor) -> FloatArray:
        """1/T over the T tokens of the trained samples, 0 for the others, float64 [n]."""
        is_trained = (advantages != 0.0).numpy()
        num_tokens = int(facts.response_lens[is_trained].sum())
        return np.where(is_trained, 1.0 / max(num_tokens, 1), 0.0)
