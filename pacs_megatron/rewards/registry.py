"""Maps `reward.name` to the reward function."""

from pacs_megatron.config.reward_options import (
    AnyReward,
    ArithmeticReward,
    CodeReward,
    CustomReward,
    FormatReward,
    HttpReward,
    MathReward,
    RewardComponent,
    WeightedReward,
)
from pacs_megatron.contracts import RewardFn
from pacs_megatron.rewards.judging import BatchRewardFn, Weighted

__all__ = ["AnyReward", "build_reward"]


def build_reward(options: AnyReward) -> RewardFn | BatchRewardFn:
    """The reward of `options`, in this process and without time limit.

    Raises ConfigError (pattern, function, sandbox, key of a server).
    """
    # Imported here: only `math` needs sympy (0.4 s), and only `custom` may load a user's module.
    match options:
        case MathReward():
            from pacs_megatron.rewards.math import AuthorsMath, Math

            return AuthorsMath() if options.label_rule == "authors" else Math()
        case ArithmeticReward():
            from pacs_megatron.rewards.arithmetic import Arithmetic

            return Arithmetic()
        case FormatReward():
            from pacs_megatron.rewards.format import Format

            return Format(options.pattern)
        case CodeReward():
            from pacs_megatron.rewards.code import Code

            return Code(options)
        case HttpReward():
            from pacs_megatron.rewards.http import Http

            return Http(options)
        case CustomReward():
            from pacs_megatron.rewards.custom import Custom

            return Custom(options.function)
        case WeightedReward():
            return Weighted([_component(part) for part in options.components])


def _component(options: RewardComponent) -> tuple[str, float, RewardFn | BatchRewardFn]:
    return options.reward.name, options.weight, build_reward(options.reward)
