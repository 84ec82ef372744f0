"""Names that an objective and the engine agree on; protocols of weight receivers and rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pacs_megatron.contracts.samples import Judgement, Prompt

if TYPE_CHECKING:
    import torch

LogprobSource = Literal["step_start", "reference", "value"]
"""The model of a pass before an update.

`step_start`: the policy with its weights at the start of the step. `reference`: the frozen
snapshot. `value`: the critic at the start of the step, whose pass returns values instead of
log-probs.
"""

Coupling = Literal["token", "sample", "group", "minibatch"]
"""The log-probs that a token's coefficient depends on: only the token's, its sample's, its group's,
or all.
"""

Statistic = Literal["score", "sampler_ratio"]
"""A number per sample, computed from log-probs, that coefficients depend on.

`score`: the masked sum of `Objective.token_scores`, or their maximum. `sampler_ratio`: mean over
the response tokens of log pi_step_start - log pi_sampler, nats.
"""

RewardFn = Callable[[Prompt, str], float | Judgement]
"""Judges the response to a prompt. Raises RewardError if it cannot, instead of returning 0.0."""


@runtime_checkable
class WeightReceiver(Protocol):
    """Receives new weights. It samples nothing between begin_update and end_update."""

    def begin_update(self, version: int) -> None: ...

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Receives one whole weight under its Hugging Face name. Raises SyncError."""

    def end_update(self, digest: str) -> None:
        """Ends the update: later samples have (version, digest).

        Raises:
            SyncError: a weight is missing.
        """
