"""The critic, a MegatronPolicy whose model returns values instead of log-probs, and the advantages
from its values.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pacs_megatron.config.schema import OptimizerOptions
from pacs_megatron.contracts import MiniBatch, Prepared, SampleFacts, UpdateReport
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.policy.engine import MegatronPolicy

_FLOOR = 1e-8
"""Added to a variance before a division, or the smallest variance that counts as positive"""


class Critic(MegatronPolicy):
    """`logprobs` and `update` of MegatronPolicy; the objective is `Objective.critic`."""

    def _metrics(
        self, prepared: Prepared, sums: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """`critic/*`, means over the response tokens."""
        count = max(sums["sum/tokens"], 1.0)
        mean = {
            name: sums[f"sum/{name}"] / count
            for name in ("return", "return_square", "error", "error_square")
        }
        variance = mean["return_square"] - mean["return"] ** 2
        unexplained = mean["error_square"] - mean["error"] ** 2
        metrics = {name: value for name, value in sums.items() if name.startswith("critic/")} | {
            "critic/loss": sums["sum/loss"],
            "critic/value_mean": sums["sum/logprob"] / count,
            "critic/return_mean": mean["return"],
            "critic/explained_variance": 1 - unexplained / variance if variance > _FLOOR else 0.0,
        }
        return metrics, dict.fromkeys(metrics.keys() - {"critic/loss"}, count)

    def with_estimates(
        self, facts: SampleFacts, minibatches: Sequence[MiniBatch], objective: Objective
    ) -> tuple[SampleFacts, list[MiniBatch]]:
        """(facts with each sample's mean |A|, mini-batches with returns and advantages).

        Collective.

        Whitens the advantages over the step's tokens. Equal values give the same bits on every rank
        and in every layout. Raises NonFiniteError on all ranks.
        """
        advantages: list[dict[int, np.ndarray]] = []
        returns: list[dict[int, np.ndarray]] = []
        for minibatch in minibatches:
            values = minibatch.estimates["value"]
            sources = (minibatch.step_start_logprobs, minibatch.reference_logprobs)
            logprobs = [[source[row] for row in values] if source else [] for source in sources]
            rewards = [float(minibatch.facts.rewards[row]) for row in values]
            own, later = objective.estimate(rewards, list(values.values()), *logprobs)
            advantages.append(dict(zip(values, own, strict=True)))
            returns.append(dict(zip(values, later, strict=True)))
        count = int(facts.response_lens.sum())
        sums = [{row: float(a.sum()) for row, a in own.items()} for own in advantages]
        mean = self._by_sample(facts, minibatches, sums).sum() / count
        squares = [
            {row: float(np.square(a - mean).sum()) for row, a in own.items()} for own in advantages
        ]
        variance = self._by_sample(facts, minibatches, squares).sum() / max(count - 1, 1)
        if not math.isfinite(variance):
            raise NonFiniteError("a value of the critic is not finite; no weight was changed")
        white = [
            {row: (a - mean) / math.sqrt(variance + _FLOOR) for row, a in own.items()}
            for own in advantages
        ]
        sizes = [{row: float(np.abs(a).mean()) for row, a in own.items()} for own in white]
        return replace(facts, advantage_abs=self._by_sample(facts, minibatches, sizes)), [
            replace(
                minibatch,
                estimates={"advantage": _float32(a), "return": _float32(g), **minibatch.estimates},
            )
            for a, g, minibatch in zip(white, returns, minibatches, strict=True)
        ]


def _float32(by_row: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    return {row: values.astype(np.float32) for row, values in by_row.items()}


def critic_optimizer(options: OptimizerOptions, lr: float) -> OptimizerOptions:
    """The policy's `options` with the critic's peak learning rate `lr`."""
    return options.model_copy(update={"lr": lr, "min_lr": options.min_lr * lr / options.lr})


def critic_report(policy: UpdateReport | None, critic: UpdateReport) -> UpdateReport:
    """The report of one update of both models, or of the critic alone during its warm-up (`policy`
    is None).
    """
    report = policy or UpdateReport(grad_norm=0.0, is_clipped=False, lr=0.0, metrics={})
    own = {name: value for name, value in critic.metrics.items() if name.startswith("critic/")}
    own |= {"critic/grad_norm": critic.grad_norm, "critic/lr": critic.lr}
    own["critic/clipped_frac"] = float(critic.is_clipped)
    denominators = {**report.denominators, **critic.denominators}
    return replace(report, metrics={**report.metrics, **own}, denominators=denominators)
