"""Values of whole responses: advantages of tokens, whitened over a step, and certainties."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pacs_megatron.contracts import MiniBatch, SampleFacts
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.policy.engine import MegatronPolicy, on_host

BySample = list[np.ndarray]
"""[response] each, of this rank's samples in the order of `tokens.index`"""

_FLOOR = 1e-8
"""added to a variance before a division"""


def with_estimates(
    model: MegatronPolicy,
    facts: SampleFacts,
    minibatches: Sequence[MiniBatch],
    objective: Objective,
) -> tuple[SampleFacts, list[MiniBatch]]:
    """Advantages, and returns of a critic, with the weights of the step's start. Collective.

    The advantages are whitened over the step's tokens: (A - mean) / sqrt(variance + 1e-8). The sums
    over samples have the same bits on every rank and in every layout, if the log-probs have.

    Args:
        model: whose ranks have the samples.
        facts: of the step, n samples.
        minibatches: of the step, with the declared log-probs, and `value` in `estimates` with a
            critic.
        objective: its `estimate` computes advantages and returns.

    Returns:
        The facts with each sample's mean |A|.
        The mini-batches with `advantage` in `estimates`, and `return` with a critic.

    Raises:
        NonFiniteError: on all ranks, if an advantage is not finite.
    """
    advantages: list[BySample] = []
    returns: list[BySample] = []
    for minibatch in minibatches:
        advantage, later = _estimate(minibatch, objective)
        advantages.append(advantage)
        returns.append(later)

    def of_samples(
        values: list[BySample],
        reduce: Callable[[np.ndarray], float],
    ) -> np.ndarray:
        """float64 [n], `reduce` of each sample's values. Collective."""
        reduced = []
        for arrays in values:
            reduced.append([float(reduce(array)) for array in arrays])
        return model.by_sample(facts, minibatches, reduced)

    count = int(facts.response_lens.sum())
    mean = of_samples(advantages, np.sum).sum() / count
    squares = of_samples(advantages, lambda array: np.square(array - mean).sum())
    variance = squares.sum() / max(count - 1, 1)
    if not math.isfinite(variance):
        source = "a log-prob" if objective.critic is None else "a value of the critic"
        raise NonFiniteError(f"{source} is not finite; no weight was changed")

    deviation = math.sqrt(variance + _FLOOR)
    whitened: list[BySample] = []
    for arrays in advantages:
        whitened.append([(array - mean) / deviation for array in arrays])
    sizes = of_samples(whitened, lambda array: np.abs(array).mean())

    completed = []
    for minibatch, advantage, later in zip(minibatches, whitened, returns, strict=True):
        estimates = {"advantage": _column(model, advantage), **minibatch.estimates}
        if objective.critic is not None:
            estimates["return"] = _column(model, later)
        completed.append(replace(minibatch, estimates=estimates))
    return replace(facts, advantage_abs=sizes), completed


def with_certainty(
    model: MegatronPolicy, facts: SampleFacts, minibatches: Sequence[MiniBatch]
) -> SampleFacts:
    """The facts with the certainty and the range of the logits of each sample. Collective.

    Args:
        model: whose ranks have the samples.
        facts: of the step, n samples.
        minibatches: of the step, with `certainty` and `logit` in `estimates`.
    """

    def of_samples(name: str, reduce: Callable[[np.ndarray], float]) -> np.ndarray:
        """float64 [n], `reduce` of each sample's values. Collective."""
        reduced = []
        for minibatch in minibatches:
            arrays = on_host(minibatch, minibatch.estimates[name])
            reduced.append([float(reduce(array.astype(np.float64))) for array in arrays])
        return model.by_sample(facts, minibatches, reduced)

    return replace(
        facts,
        certainty=of_samples("certainty", np.sum),
        logit_min=of_samples("logit", np.min),
        logit_max=of_samples("logit", np.max),
    )


def _column(model: MegatronPolicy, by_sample: BySample) -> Tensor:
    """A response column of `MiniBatch`, on the device."""
    values = np.concatenate([np.empty(0), *by_sample]).astype(np.float32)
    return torch.from_numpy(values).to(model.rank.device)


def _estimate(minibatch: MiniBatch, objective: Objective) -> tuple[BySample, BySample]:
    """Advantages and returns of this rank's samples of a mini-batch, before whitening.

    Args:
        minibatch: with the log-probs that the objective declares, and the values of a critic.
        objective: its `estimate` computes advantages and returns.

    Returns:
        Advantages, float64.
        Returns, float64; none without a critic.
    """
    values = on_host(minibatch, minibatch.estimates.get("value"))
    starts = on_host(minibatch, minibatch.step_start_logprobs)
    references = on_host(minibatch, minibatch.reference_logprobs)
    num_samples = max(len(values), len(starts))
    rewards = minibatch.facts.rewards[minibatch.tokens.index[:num_samples]]
    return objective.estimate(rewards.tolist(), values, starts, references)
