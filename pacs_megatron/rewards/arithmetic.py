"""Exact comparison of plain numbers, without symbolic mathematics."""

import re
from fractions import Fraction

from pacs_megatron.config.reward_options import ArithmeticReward
from pacs_megatron.contracts import Prompt, RewardFn
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.boxed import last_boxed

# Limits lengths and rejects exponents, so that no response can cause a gigabyte of digits.
_DECIMAL = r"(?:\d{1,3}(?:,\d{3}){1,100}|\d{1,400})(?:\.\d{1,400})?|\.\d{1,400}"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<top>{_DECIMAL})(?:\s*/\s*(?P<bottom>{_DECIMAL}))?", re.ASCII
)
_FRAC = re.compile(
    rf"(?P<sign>[+-]?)\s*\\[dt]?frac\s*\{{\s*(?P<inner>[+-]?)\s*(?P<top>{_DECIMAL})\s*\}}"
    rf"\s*\{{\s*(?P<bottom>{_DECIMAL})\s*\}}",
    re.ASCII,
)
_NOISE = re.compile(r"\\[,;:! ]|\\\$|\$|\s")


def parse_number(text: str) -> Fraction | None:
    r"""The exact value of `12`, `-1,234`, `3.50`, `7/2` or `\frac{7}{2}`; None for other text and
    for x/0.
    """
    bare = _NOISE.sub("", text.replace("−", "-"))
    match = _NUMBER.fullmatch(bare) or _FRAC.fullmatch(bare)
    if match is None:
        return None
    groups = match.groupdict()
    numerator = Fraction(groups["top"].replace(",", ""))
    denominator = Fraction(1)
    if groups["bottom"]:
        denominator = Fraction(groups["bottom"].replace(",", ""))
    if denominator == 0:
        return None

    # Only `\frac` has a second sign, inside of its numerator.
    signs = groups["sign"] + (groups.get("inner") or "")
    value = numerator / denominator
    return -value if signs.count("-") == 1 else value


def judge(prompt: Prompt, response: str) -> float:
    r"""1.0 if the number in the last `\boxed{}` equals the gold number exactly, else 0.0.

    Raises RewardError if the gold answer is not a plain number.
    """
    gold = parse_number(prompt.answer)
    if gold is None:
        raise RewardError(
            f"reward.name=arithmetic: gold answer {prompt.answer!r} of prompt {prompt.id} is not "
            "an integer, fraction or decimal; use reward.name=math or correct the data"
        )
    boxed = last_boxed(response)
    if boxed is None:
        return 0.0
    return float(parse_number(boxed) == gold)


def build(_: ArithmeticReward) -> RewardFn:
    return judge
