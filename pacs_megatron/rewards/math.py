r"""Mathematical equality of the final answer and the reference.

`last_box` reads the last `\boxed{}` by the rules of `mathematics/`. `authors_rule` is math-verify's
metric, as the PACS authors use it.
"""

from functools import partial

from math_verify import ExprExtractionConfig, LatexExtractionConfig
from math_verify.metric import math_metric

from pacs_megatron.config.reward_options import MathReward
from pacs_megatron.contracts import Judgement, Prompt, RewardFn
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.boxed import boxed_answer, last_boxed
from pacs_megatron.rewards.mathematics import compare, is_readable, read_gold, shown
from pacs_megatron.rewards.mathematics.symbolic import TimeLimitError

_METRIC = math_metric((LatexExtractionConfig(),), (ExprExtractionConfig(), LatexExtractionConfig()))
_SYMBOLIC_SHARE = 0.4
"""of the time limit for one use of sympy; a judgement has at most two, and one of a gold answer
once
"""
_TIME_LIMIT_S = 10.0


def build(options: MathReward) -> RewardFn:
    """The rule of `label_rule`."""
    if options.label_rule == "authors":
        return authors_rule
    return partial(judge, time_limit_s=options.timeout_s)


def judge(prompt: Prompt, response: str, time_limit_s: float = _TIME_LIMIT_S) -> Judgement:
    r"""1.0 if the last `\boxed{}` equals the gold answer mathematically, else 0.0 (also without a
    box).

    The details are what was read: `gold` and `answer`, each with its kind. Reads the gold answer
    first, so a malformed one fails all responses, not only those with a box.

    Raises RewardError if the gold answer cannot be read, or if sympy does not end with it.
    """
    limit_s = _SYMBOLIC_SHARE * time_limit_s
    boxed_gold = last_boxed(prompt.answer)
    gold = read_gold(prompt.answer if boxed_gold is None else boxed_gold)
    if not is_readable(gold, limit_s):
        raise RewardError(
            f"reward.name=math: gold answer {prompt.answer!r} of prompt {prompt.id} is no "
            "mathematics and no text that can be read; correct or remove the row"
        )
    boxed = boxed_answer(response)
    if not boxed:
        return Judgement(0.0, {"gold": shown(gold), "answer": "no box"})
    try:
        result = compare(gold, boxed, limit_s)
    except TimeLimitError as error:
        raise RewardError(
            f"reward.name=math: sympy does not end within {limit_s:g} s with gold answer "
            f"{prompt.answer!r} of prompt {prompt.id}; correct or remove the row"
        ) from error
    return Judgement(float(result.is_right), {"gold": result.gold, "answer": result.answer})


def last_box(prompt: Prompt, response: str) -> float:
    """The reward of `judge`."""
    return judge(prompt, response).reward


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
