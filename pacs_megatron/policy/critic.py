"""The critic and the advantages from its values.

The critic is a MegatronPolicy whose model returns values instead of log-probs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pacs_megatron.config.schema import OptimizerOptions
from pacs_megatron.contracts import MiniBatch, Prepared, SampleFacts, UpdateReport
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.policy.engine import MegatronPolicy, on_host

BySample = list[np.ndarray]
"""[response] each, of this rank's samples in the order of `tokens.index`"""

_FLOOR = 1e-8
"""Added to a variance before a division, or the smallest variance that counts as positive"""


class Critic(MegatronPolicy):
    """`logprobs` and `update` of MegatronPolicy; the objective is `Objective.critic`."""

    def _metrics(
        self,
        prepared: Prepared,
        sums: Mapping[str, float],
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics of an update.

        The explained variance is 1 - Var(return - value) / Var(return) over the response tokens.

        Args:
            prepared: unused.
            sums: of the reports of the loss, over all ranks.

        Returns:
            `critic/*`.
            The denominators of those that are means over the response tokens.
        """
        count = max(sums["sum/tokens"], 1.0)
        mean_return = sums["sum/return"] / count
        mean_error = sums["sum/error"] / count
        variance = sums["sum/return_square"] / count - mean_return**2
        unexplained = sums["sum/error_square"] / count - mean_error**2
        explained = 0.0
        if variance > _FLOOR:
            explained = 1 - unexplained / variance

        metrics = {name: value for name, value in sums.items() if name.startswith("critic/")}
        metrics |= {
            "critic/loss": sums["sum/loss"],
            "critic/value_mean": sums["sum/logprob"] / count,
            "critic/return_mean": mean_return,
            "critic/explained_variance": explained,
        }
        means = metrics.keys() - {"critic/loss"}
        return metrics, dict.fromkeys(means, count)

    def with_estimates(
        self,
        facts: SampleFacts,
        minibatches: Sequence[MiniBatch],
        objective: Objective,
    ) -> tuple[SampleFacts, list[MiniBatch]]:
        """Returns and advantages from the values of the step's start. Collective.

        The advantages are whitened over the step's tokens: (A - mean) / sqrt(variance + 1e-8). The
        sums over samples have the same bits on every rank and in every layout, if the values have.

        Args:
            facts: of the step, n samples.
            minibatches: of the step, with `value` in `estimates` and the declared log-probs.
            objective: its `estimate` computes advantages and returns.

        Returns:
            The facts with each sample's mean |A|.
            The mini-batches with `advantage` and `return` in `estimates`.

        Raises:
            NonFiniteError: on all ranks, if a value is not finite.
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
            return self._by_sample(facts, minibatches, reduced)

        count = int(facts.response_lens.sum())
        mean = of_samples(advantages, np.sum).sum() / count
        squares = of_samples(advantages, lambda array: np.square(array - mean).sum())
        variance = squares.sum() / max(count - 1, 1)
        if not math.isfinite(variance):
            raise NonFiniteError("a value of the critic is not finite; no weight was changed")

        deviation = math.sqrt(variance + _FLOOR)
        whitened: list[BySample] = []
        for arrays in advantages:
            whitened.append([(array - mean) / deviation for array in arrays])
        sizes = of_samples(whitened, lambda array: np.abs(array).mean())

        completed = []
        for minibatch, advantage, later in zip(minibatches, whitened, returns, strict=True):
            estimates = {
                "advantage": self._column(advantage),
                "return": self._column(later),
                **minibatch.estimates,
            }
            completed.append(replace(minibatch, estimates=estimates))
        return replace(facts, advantage_abs=sizes), completed

    def _column(self, by_sample: BySample) -> Tensor:
        """A response column of `MiniBatch`, on the device."""
        values = np.concatenate([np.empty(0), *by_sample]).astype(np.float32)
        return torch.from_numpy(values).to(self.rank.device)


def _estimate(minibatch: MiniBatch, objective: Objective) -> tuple[BySample, BySample]:
    """Advantages and returns of this rank's samples of a mini-batch, before whitening.

    Args:
        minibatch: with `value` in `estimates` and the log-probs that the objective declares.
        objective: its `estimate` computes advantages and returns.

    Returns:
        Advantages, float64.
        Returns, float64.
    """
    values = on_host(minibatch, minibatch.estimates["value"])
    rewards = minibatch.facts.rewards[minibatch.tokens.index[: len(values)]]
    return objective.estimate(
        rewards.tolist(),
        values,
        on_host(minibatch, minibatch.step_start_logprobs),
        on_host(minibatch, minibatch.reference_logprobs),
    )


def critic_optimizer(options: OptimizerOptions, lr: float) -> OptimizerOptions:
    """The policy's `options` with the critic's peak learning rate `lr`.

    The ratio of the lowest to the peak rate stays.
    """
    min_lr = options.min_lr * lr / options.lr
    return options.model_copy(update={"lr": lr, "min_lr": min_lr})


def critic_report(policy: UpdateReport | None, critic: UpdateReport) -> UpdateReport:
    """The report of one update of both models.

    Args:
        policy: report of the policy's update; None: during the warm-up the critic alone is updated.
        critic: report of the critic's update.
    """
    report = policy or UpdateReport(grad_norm=0.0, is_clipped=False, lr=0.0, metrics={})
    metrics = {name: value for name, value in critic.metrics.items() if name.startswith("critic/")}
    metrics |= {
        "critic/grad_norm": critic.grad_norm,
        "critic/lr": critic.lr,
        "critic/clipped_frac": float(critic.is_clipped),
    }
    return replace(
        report,
        metrics={**report.metrics, **metrics},
        denominators={**report.denominators, **critic.denominators},
    )
