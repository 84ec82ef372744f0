"""The critic: a MegatronPolicy whose model returns values instead of log-probs."""

from collections.abc import Mapping
from dataclasses import replace

from pacs_megatron.config.schema import OptimizerOptions
from pacs_megatron.contracts import Prepared, UpdateReport
from pacs_megatron.policy.engine import MegatronPolicy

_FLOOR = 1e-8
"""the smallest variance that counts as positive"""


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
