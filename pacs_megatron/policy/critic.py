"""The critic and the advantages from its values.

The critic is a MegatronPolicy whose model returns values instead of log-probs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pacs_megatron.config.schema import OptimizerOptions
from pacs_megatron.contracts import MiniBatch, Prepared, SampleFacts, UpdateReport
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.policy.engine import MegatronPolicy

ByRow = dict[int, np.ndarray]
"""row of a mini-batch's facts -> [response], of this rank's samples"""

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
        advantages: list[ByRow] = []
        returns: list[ByRow] = []
        for minibatch in minibatches:
            advantage, later = _estimate(minibatch, objective)
            advantages.append(advantage)
            returns.append(later)

        def of_samples(
            values: list[ByRow],
            reduce: Callable[[np.ndarray], float],
        ) -> np.ndarray:
            """float64 [n], `reduce` of each sample's values. Collective."""
            reduced: list[dict[int, float]] = []
            for by_row in values:
                reduced.append({row: float(reduce(array)) for row, array in by_row.items()})
            return self._by_sample(facts, minibatches, reduced)

        count = int(facts.response_lens.sum())
        mean = of_samples(advantages, np.sum).sum() / count
        squares = of_samples(advantages, lambda array: np.square(array - mean).sum())
        variance = squares.sum() / max(count - 1, 1)
        if not math.isfinite(variance):
            raise NonFiniteError("a value of the critic is not finite; no weight was changed")

        deviation = math.sqrt(variance + _FLOOR)
        whitened: list[ByRow] = []
        for by_row in advantages:
            whitened.append({row: (array - mean) / deviation for row, array in by_row.items()})
        sizes = of_samples(whitened, lambda array: np.abs(array).mean())

        completed = []
        for minibatch, advantage, later in zip(minibatches, whitened, returns, strict=True):
            estimates = {
                "advantage": _float32(advantage),
                "return": _float32(later),
                **minibatch.estimates,
            }
            completed.append(replace(minibatch, estimates=estimates))
        return replace(facts, advantage_abs=sizes), completed


def _estimate(minibatch: MiniBatch, objective: Objective) -> tuple[ByRow, ByRow]:
    """Advantages and returns of this rank's samples of a mini-batch, before whitening.

    Args:
        minibatch: with `value` in `estimates` and the log-probs that the objective declares.
        objective: its `estimate` computes advantages and returns.

    Returns:
        Advantages, float64.
        Returns, float64.
    """
    values = minibatch.estimates["value"]
    rewards = [float(minibatch.facts.rewards[row]) for row in values]
    advantages, returns = objective.estimate(
        rewards,
        list(values.values()),
        _in_order(values, minibatch.step_start_logprobs),
        _in_order(values, minibatch.reference_logprobs),
    )
    return (
        dict(zip(values, advantages, strict=True)),
        dict(zip(values, returns, strict=True)),
    )


def _in_order(rows: Iterable[int], by_row: ByRow | None) -> list[np.ndarray]:
    """The arrays of `rows`; none if the objective does not declare this pass."""
    if not by_row:
        return []
    return [by_row[row] for row in rows]


def _float32(by_row: Mapping[int, np.ndarray]) -> ByRow:
    """The arrays in the type of `MiniBatch.estimates`."""
    return {row: values.astype(np.float32) for row, values in by_row.items()}


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
