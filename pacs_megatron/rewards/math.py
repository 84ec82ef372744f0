r"""Mathematical equality by math-verify, on the last `\boxed{}` of a response.

math-verify's time limits are off, because the pool limits the worker process. Only its LaTeX
grammar is used, because its grammar for plain expressions evaluates the model's text as Python.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.metric import math_metric

from pacs_megatron.config.reward_options import MathReward
from pacs_megatron.contracts import Prompt, RewardFn
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.boxed import last_boxed

_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off
_METRIC = math_metric((LatexExtractionConfig(),), (ExprExtractionConfig(), LatexExtractionConfig()))
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
# "1,234,567" is one number; "1,2" and "3, 500" are lists.
_THOUSANDS = re.compile(r"(?<![\d.,])(-?[1-9]\d{0,2})((?:,\d{3})+)(?![\d,])")
_BASED = re.compile(r"(?P<digits>-?[0-9A-Za-z]+)_\{?(?:\\text\{)?(?P<base>\d+)\}{0,2}")


def build(options: MathReward) -> RewardFn:
    """The rule of `label_rule`."""
    return authors_rule if options.label_rule == "authors" else last_box


def last_box(prompt: Prompt, response: str) -> float:
    r"""1.0 if the last `\boxed{}` equals the gold answer mathematically, else 0.0 (also without a
    box).

    Parses the gold answer first, so a malformed one fails all responses, not only those with a box.

    Raises RewardError if the gold answer cannot be parsed or the comparison fails.
    """
    gold = _parse_gold(prompt.answer)
    if not gold:
        raise RewardError(
            f"reward.name=math: gold answer {prompt.answer!r} of prompt {prompt.id} is not LaTeX "
            "that math-verify can parse; correct or remove the row"
        )
    boxed = last_boxed(response)
    if not boxed or _other_base(prompt.answer, boxed):
        return 0.0
    answer = _parse(boxed)
    if not answer:
        return 0.0
    try:
        return float(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
    except Exception as error:  # sympy raises many types; each of them means "not judged"
        raise RewardError(
            f"reward.name=math: comparing {boxed[:200]!r} with gold {prompt.answer!r} of prompt "
            f"{prompt.id} raised {type(error).__name__}"
        ) from error


def authors_rule(prompt: Prompt, response: str) -> float:
    r"""The label rule of the PACS authors' code: math-verify's metric on the whole response.

    The final expression counts anywhere in the text, with or without `\boxed{}`: LaTeX or plain
    numbers, with math-verify's priorities and time limits. math-verify evaluates plain expressions
    as Python; its grammar accepts only digits, operators and parentheses.

    Source: ritzz-ai/PACS, src/reward_function.py (bbe1dc6). One difference: an error, such as a
    gold answer without LaTeX, is a 0 there and a RewardError here.
    """
    try:
        score, _ = _METRIC([f"\\boxed{{{prompt.answer}}}"], [response])
        return float(score)
    except Exception as error:  # math-verify and sympy raise many types
        raise RewardError(
            f"reward.name=math: judging with gold answer {prompt.answer!r} of prompt {prompt.id} "
            f"raised {type(error).__name__}; correct or remove the row if it is not LaTeX"
        ) from error


@lru_cache(maxsize=1024)
def _parse_gold(answer: str) -> list[Any]:
    """Cached: all samples of a group have the same gold answer."""
    boxed = last_boxed(answer)
    text = answer if boxed is None else boxed
    return _parse(text) if text.strip() else []


def _parse(latex: str) -> list[Any]:
    """The candidates that math-verify reads from an answer; empty if it cannot be parsed."""
    text = f"\\boxed{{{_clean(latex)}}}"
    parsed: list[Any] = parse(text, _LATEX, fallback_mode="no_fallback", parsing_timeout=None)
    return parsed


def _other_base(gold: str, answer: str) -> bool:
    """True for two numerals of different bases (40_9 and 40_8): math-verify drops the subscript of
    numbers.
    """
    left = _BASED.fullmatch(_clean(gold))
    right = _BASED.fullmatch(_clean(answer))
    return left is not None and right is not None and left["base"] != right["base"]


def _clean(latex: str) -> str:
    """An answer without `$`, Unicode minus and commas between thousands."""
    text = latex.strip()
    for left, right in _WRAPPERS:
        if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)].strip()
            break
    text = text.replace("−", "-").replace(r"{,}", ",")
    return _THOUSANDS.sub(lambda match: match[1] + match[2].replace(",", ""), text)
