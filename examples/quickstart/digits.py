"""The reward of `quickstart-hybrid`: 1 for a response with a digit."""

from pacs_megatron.contracts import RewardSample


def judge(sample: RewardSample) -> float:
    """1 if the response has a digit, else 0. A random model has one in a fifth of them."""
    return float(any(character.isdecimal() for character in sample.response))
