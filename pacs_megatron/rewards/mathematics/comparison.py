"""Compares an answer with a gold answer, both as written."""

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pacs_megatron.rewards.mathematics import symbolic
from pacs_megatron.rewards.mathematics.answers import Answer, Clock, Items, Quantity
from pacs_megatron.rewards.mathematics.choices import choice, letters
from pacs_megatron.rewards.mathematics.equality import renamed, same
from pacs_megatron.rewards.mathematics.expression import MAX_CHARS, Node, variables
from pacs_megatron.rewards.mathematics.reading import readings
from pacs_megatron.rewards.mathematics.spelling import plain

_MAX_SHOWN = 200
_INTEGER = re.compile(r'([a-z])(?:∈ℤ|"(?:is |being )?(?:an |any )?integers?")')
"""the parameter of `\\pi k, k \\in \\mathbb{Z}`"""
_COMMAND = re.compile(r"\\[A-Za-z]+")


class Comparison(NamedTuple):
    """Whether an answer is right, and what was read."""

    is_right: bool
    gold: str
    answer: str


class Gold(NamedTuple):
    """A gold answer in plain form and what it may mean; empty if nothing can be read."""

    text: str
    answers: tuple[Answer, ...]
    has_variables: bool


@lru_cache(maxsize=1024)
def read_gold(text: str) -> Gold:
    """Cached: all samples of a group have the same gold answer."""
    form = plain(text) if len(text) <= MAX_CHARS else text
    answers = readings(form, False)
    return Gold(form, answers, any(_has_variables(answer) for answer in answers))


def is_readable(gold: Gold, time_limit_s: float) -> bool:
    """Whether an answer can be compared with it."""
    if not gold.text.strip():
        return False
    if gold.answers:
        return True
    if symbolic.is_needed(gold.text, ""):
        return symbolic.is_readable(gold.text, time_limit_s)
    # Only the same text is right then.
    has_content = re.search(r"[^\W_]", _COMMAND.sub("", gold.text)) is not None
    return has_content and gold.text.count("{") == gold.text.count("}")


def compare(gold: Gold, answer: str, time_limit_s: float) -> Comparison:
    """Whether `answer`, the content of a box, equals the gold answer.

    Args:
        gold: of `read_gold`.
        answer: as written.
        time_limit_s: of each use of math-verify.
    """
    if len(answer) > MAX_CHARS:
        return Comparison(False, shown(gold), "not read: too long")
    form = plain(answer)
    answers = readings(form, not gold.has_variables, decimal_comma="." in gold.text)
    answers = _with_parameter(answers, _parameter(form), _parameter(gold.text))
    is_right = (
        _same_text(gold.text, form)
        or _same_choice(gold.text, form)
        or _is_any(gold.answers, answers)
    )
    if not is_right and symbolic.is_needed(gold.text, form):
        is_right = symbolic.is_equal(gold.text, form, time_limit_s)
    return Comparison(is_right, shown(gold), _shown(form, answers))


def _parameter(text: str) -> str:
    """The letter that stands for any integer; empty if there is none."""
    match = _INTEGER.search(text)
    return "" if match is None else match[1]


def _with_parameter(answers: tuple[Answer, ...], mine: str, gold: str) -> tuple[Answer, ...]:
    """With the gold answer's letter for any integer; unchanged if one of the two names none."""
    if not mine or not gold or mine == gold:
        return answers
    return tuple(renamed(answer, mine, gold) for answer in answers if not _uses(answer, gold))


def _uses(part: object, name: str) -> bool:
    """Whether a variable has this name."""
    if part == Node("variable", name):
        return True
    return isinstance(part, tuple) and any(_uses(item, name) for item in part)


def shown(gold: Gold) -> str:
    """The gold answer as it was read, in one line."""
    return _shown(gold.text, gold.answers)


def _has_variables(answer: object) -> bool:
    """Whether a letter of the gold answer is a variable."""
    if isinstance(answer, Quantity):
        return bool(variables(answer.node))
    if isinstance(answer, Items):
        return any(_has_variables(item) for item in answer.items)
    if isinstance(answer, tuple) and not isinstance(answer, Clock):
        return any(_has_variables(part) for part in answer)
    return False


def _same_text(gold: str, answer: str) -> bool:
    """The same spelling, but for spaces and quotes, and for capitals if the gold is a word."""
    first = _letters(gold)
    second = _letters(answer)
    if not first:
        return False
    is_word = re.fullmatch(r"[^\W\d_]{2,}", first) is not None
    return first.casefold() == second.casefold() if is_word else first == second


def _letters(text: str) -> str:
    bare = text.replace('"', "")
    return re.sub(r"(?<![\dA-Za-z])\s+|\s+(?![\dA-Za-z])", "", bare).strip(" .")


def _same_choice(gold: str, answer: str) -> bool:
    """A letter of multiple choice, maybe with its text; or several letters."""
    several = letters(gold)
    if several:
        return several == letters(answer)
    wanted = choice(gold)
    if wanted is None:
        return False
    given = choice(answer)
    if given is not None:
        return given[0] == wanted[0]
    # `(B) 12`: the text alone is right, too.
    return bool(wanted[1]) and _is_any(readings(plain(wanted[1]), False), readings(answer, True))


def _is_any(golds: Sequence[Answer], answers: Sequence[Answer]) -> bool:
    """Whether one reading of the gold answer equals one of the answer."""
    return any(same(gold, answer) for gold, answer in itertools.product(golds, answers))


def _shown(text: str, answers: tuple[Answer, ...]) -> str:
    """The kind of answer and its plain form, in one line."""
    if not answers:
        return f"not read: {text}"[:_MAX_SHOWN]
    first = answers[0]
    if isinstance(first, Items):
        kind = {"brackets": "interval"}.get(first.kind, first.kind)
    elif isinstance(first, Quantity):
        kind = "expression" if variables(first.node) else "number"
    else:
        kind = _KINDS.get(type(first).__name__, type(first).__name__.lower())
    return f"{kind}: {text}"[:_MAX_SHOWN]


_KINDS = {
    "Reals": "real numbers",
    "Named": "value with a name",
    "Clock": "time",
    "Numeral": "numeral of a base",
}
