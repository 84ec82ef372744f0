"""Whether a gold answer is fit to judge with: how a model would write it, and what is doubtful."""

import re
from fractions import Fraction

from pacs_megatron.rewards.mathematics.answers import Answer, Items, Named, Quantity, Words
from pacs_megatron.rewards.mathematics.choices import choice
from pacs_megatron.rewards.mathematics.comparison import read_gold
from pacs_megatron.rewards.mathematics.expression import variables
from pacs_megatron.rewards.mathematics.reading import without_sentence
from pacs_megatron.rewards.mathematics.value import NoValueError, value

_PLACEHOLDERS = frozenset(
    (
        *("n/a", "na", "null", "nan", "unknown", "tbd", "todo", "-", "see solution", "no answer"),
        *("not available", "see explanation", "not given", "proof", "answer", "error"),
    )
)
_SPACED = re.compile(r"\d[ \u00a0\u202f]+\d{3}(?!\d)")


def natural_answer(text: str) -> str | None:
    """The plain spelling of a gold answer that is one number or one letter, else None."""
    gold = read_gold(text)
    letter = choice(gold.text)
    if letter is not None:
        return letter[0]
    return _natural(gold.answers[0]) if gold.answers else None


def doubt(text: str) -> str | None:
    """Why right answers may fail with this gold answer, with the fix; None without a doubt."""
    gold = read_gold(text)
    bare = gold.text.replace('"', "").strip().lower()
    if bare in _PLACEHOLDERS:
        return "is a placeholder; remove the row"
    if without_sentence(gold.text) != gold.text:
        return "is a sentence; write the answer alone"
    letter = choice(gold.text)
    if letter is not None and letter[1]:
        return f"has a letter and a text; write {letter[0]}"
    if _SPACED.search(text):
        return "has a space between digits; write the number without it"
    if not gold.answers:
        return "is not read as mathematics: only the same text is right"
    first = gold.answers[0]
    if isinstance(first, Words) and len(" ".join(first.parts).split()) > _MAX_WORDS:
        return f"has more than {_MAX_WORDS} words: only the same words are right"
    return None


_MAX_WORDS = 6


def _natural(answer: Answer) -> str | None:
    if isinstance(answer, Named):
        return _natural(answer.values[-1])
    if isinstance(answer, Items) and answer.kind == "set" and len(answer.items) == 1:
        return _natural(answer.items[0])
    if not isinstance(answer, Quantity) or answer.rest is not None or variables(answer.node):
        return None
    try:
        number = value(answer.node)
    except NoValueError:
        return None
    if not isinstance(number, Fraction):
        return None
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > _MAX_BITS:
        return None
    if number.denominator == 1:
        return str(number)
    sign = "-" if number < 0 else ""
    return rf"{sign}\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"


_MAX_BITS = 200
"""A longer number, such as 2^{4950}, has no natural spelling but its own."""
