"""Verifiers, and the pool of worker processes that runs them."""

from pacs_megatron.rewards.judging import build_reward
from pacs_megatron.rewards.labels import check_failures, label_of
from pacs_megatron.rewards.pool import RewardPool, Verdict

__all__ = ["RewardPool", "Verdict", "build_reward", "check_failures", "label_of"]
