"""The optimizer's options of a critic."""

from __future__ import annotations

from pacs_megatron.config.schema import OptimizerOptions
from pacs_megatron.policy.critic import critic_optimizer


def test_the_lowest_rate_keeps_its_ratio_to_the_peak() -> None:
    policy = OptimizerOptions(lr=1e-6, min_lr=2e-7, schedule="cosine", weight_decay=0.1)
    critic = critic_optimizer(policy, 1e-5)
    assert (critic.lr, critic.min_lr) == (1e-5, 2e-7 * 1e-5 / 1e-6)
    assert critic == policy.model_copy(update={"lr": critic.lr, "min_lr": critic.min_lr})


def test_without_a_lowest_rate_the_critic_has_none() -> None:
    assert critic_optimizer(OptimizerOptions(lr=1e-6), 1e-5).min_lr == 0.0
