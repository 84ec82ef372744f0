"""DAPO (arXiv:2503.14476):

GRPO with a higher upper clip, a mean over tokens, and a soft punishment of long responses.

    l = -min(rho A, clip(rho, 1 - 0.2, 1 + 0.28) A)

per token, mean over all tokens of the mini-batch (equation 8), A = (R - mean) / s in the group
(equation 9), no KL term. Equation 13 adds to R

    overlong_penalty * min(0, (overlong_length - overlong_buffer - |o|) / overlong_buffer),

but at least -overlong_penalty. verl's reward_manager/dapo.py has no lower bound, which gives the
same value because responses end at overlong_length. The paper uses overlong_length = 20480,
overlong_buffer = 4096, and rewards of 1 and -1 with a punishment of up to 1. This project's rewards
are 1 and 0, so the same A needs 0.5, the default.

Dynamic sampling replaces groups of one class before the update. Its options are
`admission.drop_one_class_groups` and `admission.refill_rounds`.
"""

from typing import Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from pacs_megatron.contracts import SampleFacts
from pacs_megatron.objectives.shared.groups import FloatArray
from pacs_megatron.objectives.shared.policy_gradient import (
    ClippedOptions,
    PolicyGradient,
    TokenMeanOptions,
)


class DapoOptions(TokenMeanOptions, ClippedOptions):
    """DAPO: GRPO with clip-higher, token mean and a soft punishment of long responses."""

    name: Literal["dapo"]
    """Name of the objective."""
    clip_high: float = Field(default=0.28, gt=0)
    """Clip the probability ratio at 1 + clip_high from above."""
    overlong_length: PositiveInt | None = None
    """Response length of the full punishment, in tokens: rollout.sampling.max_response_tokens.
    null: no punishment.
    """
    overlong_buffer: PositiveInt | None = None
    """Number of tokens before `overlong_length` over which the punishment grows from 0.

    Required with `overlong_length`.
    """
    overlong_penalty: float = Field(default=0.5, gt=0)
    """Largest punishment, in units of the reward."""

    @model_validator(mode="after")
    def _check_punishment(self) -> Self:
        length = self.overlong_length
        buffer = self.overlong_buffer
        default_penalty = type(self).model_fields["overlong_penalty"].default

        if (length is None) != (buffer is None):
            raise ValueError(
                f"objective.overlong_length={length} and objective.overlong_buffer={buffer} go "
                "together; set both or none"
            )
        if length is None and self.overlong_penalty != default_penalty:
            raise ValueError(
                f"objective.overlong_penalty={self.overlong_penalty} is not used without "
                "overlong_length; set it too"
            )
        if length is not None and buffer is not None and buffer >= length:
            raise ValueError(
                f"objective.overlong_buffer={buffer} is not below overlong_length={length}; lower "
                "it"
            )
        return self


class Dapo(PolicyGradient, options=DapoOptions):
    """DAPO; see `PolicyGradient` for the arguments."""

    options: DapoOptions

    def rewards(self, facts: SampleFacts) -> FloatArray:
        """R with the punishment of long responses (equation 13), float64 [n]."""
        length = self.options.overlong_length
        buffer = self.options.overlong_buffer
        if length is None or buffer is None:
            return np.asarray(facts.rewards)

        excess = (facts.response_lens - (length - buffer)) / buffer
        share = np.clip(excess, 0.0, 1.0)
        return np.asarray(facts.rewards - self.options.overlong_penalty * share)
