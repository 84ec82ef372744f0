"""Maps `reward.name` to the reward function."""

from pacs_megatron.config.reward_options import ArithmeticReward, CustomReward, FormatReward, MathReward
from pacs_megatron.contracts import RewardFn

AnyReward = MathReward | ArithmeticReward | FormatReward | CustomReward


def build_reward(options: AnyReward) -> RewardFn:
    """The reward of `options`, in this process and without time limit. Raises ConfigError (pattern, function)."""
    # Imported here: only `math` needs sympy (0.4 s), and only `custom` may load a user's module.
    match options:
        case MathReward():
            from pacs_megatron.rewards.math import Math

            return Math()
        case ArithmeticReward():
            from pacs_megatron.rewards.arithmetic import Arithmetic

            return Arithmetic()
        case FormatReward():
            from pacs_megatron.rewards.format import Format

            return Format(options.pattern)
        case CustomReward():
            from pacs_megatron.rewards.custom import Custom

            return Custom(options.function)
