"""GSPO (arXiv:2507.18071, equations 5 to 7) and LUSPO (arXiv:2602.05261): one ratio for a whole
response.

    s = exp(mean_t(log pi_theta - log pi_step_start))

GSPO minimises the mean over samples of -min(s A, clip(s, 1 - low, 1 + high) A), A = (R - mean) /
s_R in the group. The default clips are the paper's 3e-4 and 4e-4 (section 5.1). s is a geometric
mean, so it changes far less than a token's ratio, and a clip of 0.2 never applies.

LUSPO multiplies the same term by |o|, so a token's gradient does not shrink with the length of its
response. We could not read the authors' code: the formula is that of TRL's `loss_type="luspo"`, and
the clips 2e-3 and 2.5e-3 come from TRL's page on the paper (section 5.1).
"""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from pacs_megatron.contracts import SampleFacts
from pacs_megatron.objectives.shared.groups import FloatArray
from pacs_megatron.objectives.shared.lazy import Tensor
from pacs_megatron.objectives.shared.policy_gradient import (
    ClippedOptions,
    PolicyGradient,
    mean_weights,
)


class GspoOptions(ClippedOptions):
    """GSPO: one clipped ratio for a whole response, the geometric mean over its tokens."""

    name: Literal["gspo"]
    """Name of the objective."""
    clip_low: float = Field(default=3e-4, gt=0, lt=0.1)
    """Clip the sample's ratio at 1 - clip_low from below.

    Below 0.1: a geometric mean over tokens moves little.
    """
    clip_high: float = Field(default=4e-4, gt=0, lt=0.1)
    """Clip the sample's ratio at 1 + clip_high from above.

    Below 0.1: a geometric mean over tokens moves little.
    """


class Gspo(PolicyGradient, options=GspoOptions):
    """GSPO; see `PolicyGradient` for the arguments."""

    ratio_of: ClassVar[Literal["mean"]] = "mean"

    def token_weights(self, facts: SampleFacts, advantages: Tensor) -> FloatArray:
        """1/(N |o|), float64 [n]: the |o| tokens of a sample add up to the sample's term."""
        return mean_weights(facts.response_lens, "sequence")


class LuspoOptions(GspoOptions):
    """LUSPO: GSPO's loss of a response, times the response's length."""

    name: Literal["luspo"]  # type: ignore[assignment]
    """Name of the objective."""
    clip_low: float = Field(default=2e-3, gt=0, lt=0.1)
    """Clip the sample's ratio at 1 - clip_low from below.

    Below 0.1: a geometric mean over tokens moves little.
    """
    clip_high: float = Field(default=2.5e-3, gt=0, lt=0.1)
    """Clip the sample's ratio at 1 + clip_high from above.

    Below 0.1: a geometric mean over tokens moves little.
    """


class Luspo(Gspo, options=LuspoOptions):
    """LUSPO; see `PolicyGradient` for the arguments."""

    def token_weights(self, facts: SampleFacts, advantages: Tensor) -> FloatArray:
        """1/N, float64 [n]: the |o| tokens of a sample add up to |o| times the sample's term."""
        return np.full(facts.num_samples, 1.0 / facts.num_samples)
