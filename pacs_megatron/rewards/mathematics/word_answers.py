"""Answers in words: `even`, `no solution`, `Alice and Bob`, `July 4`."""

import re
from fractions import Fraction

from pacs_megatron.rewards.mathematics.answers import Words
from pacs_megatron.rewards.mathematics.words import word_set

_ONES = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
NUMBER_WORDS: dict[str, Fraction | int] = {word: number for number, word in enumerate(_ONES)}
for _number, _word in enumerate(_TENS, start=2):
    NUMBER_WORDS[_word] = 10 * _number
    for _one in range(1, 10):
        NUMBER_WORDS[f"{_word} {_ONES[_one]}"] = 10 * _number + _one
NUMBER_WORDS |= {
    "hundred": 100,
    "one hundred": 100,
    "half": Fraction(1, 2),
    "one half": Fraction(1, 2),
    "one third": Fraction(1, 3),
    "two thirds": Fraction(2, 3),
    "one quarter": Fraction(1, 4),
    "one fourth": Fraction(1, 4),
    "three quarters": Fraction(3, 4),
    "three fourths": Fraction(3, 4),
}
"""Numbers in words"""
_SYNONYMS = {
    "infinity": "∞",
    "plus infinity": "∞",
    "no": "no",
    "none": "no solution",
    "no real solution": "no solution",
    "no solution exist": "no solution",
    "there are no solution": "no solution",
    "there is no solution": "no solution",
    "no such value": "no solution",
    "no value": "no solution",
    "empty set": "no solution",
    "dne": "does not exist",
    "doe not exist": "does not exist",
    "limit doe not exist": "does not exist",
    "infinite": "infinitely many",
    "infinitely many solution": "infinitely many",
    "infinite solution": "infinitely many",
    "infinitely many": "infinitely many",
    "t": "true",
    "f": "false",
}
_ARTICLES = frozenset(("the", "a", "an", "it", "is", "are", "always", "of"))
_LEADS = re.compile(
    r"^(?:(?:the |so |thus |hence |therefore |final |correct )*"
    r"(?:answer|result|solution) (?:is|are)|"
    r"it is|this is|that is|is|are) "
)
MONTHS = word_set(
    "january february march april may june july august september october november december jan feb "
    "mar apr jun jul aug sep sept oct nov dec"
)
_WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*", re.UNICODE)
_MATHEMATICS = re.compile(r"[=<>≤≥≠∈∪\\^_+·×÷%$€£¥₹°|{}\[\]]")
_MAX_WORDS = 40


def read_words(text: str) -> Words | None:
    """The words of a text without mathematics; None if it has other than words."""
    if '"' not in text or _MATHEMATICS.search(text):
        # A bare `even` is quoted by the spelling; letters alone are variables.
        return None
    bare = text.replace('"', " ")
    if re.search(r"\d", bare) and not _is_date(bare):
        return None
    outside = re.sub(r'"[^"]*"', "", text)
    if re.search(r"[A-Za-z]{2,}", outside):
        return None
    words = [word.lower() for word in _WORD.findall(bare)]
    if not words or len(words) > _MAX_WORDS:
        return None
    if _is_date(bare):
        return Words((" ".join(sorted(_day(word) for word in words)),))
    joined = _LEADS.sub("", " ".join(words))
    parts = re.split(r"\band\b", joined) if " or " not in f" {joined} " else [joined]
    if "," in bare and " or " not in f" {joined} ":
        parts = re.split(r",|\band\b", _LEADS.sub("", bare.lower()))
    cleaned = [_cleaned(part) for part in parts]
    kept = tuple(sorted(part for part in cleaned if part))
    return Words(kept) if kept else None


def _cleaned(text: str) -> str:
    """Without articles, in the singular, one of several synonyms."""
    words = [word for word in _WORD.findall(text) if word not in _ARTICLES]
    singular = [_singular(word) for word in words]
    result = " ".join(singular)
    return _SYNONYMS.get(result, result)


def _singular(word: str) -> str:
    is_plural = len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    return word[:-1] if is_plural else word


def _is_date(text: str) -> bool:
    return any(word.lower() in MONTHS for word in _WORD.findall(text)) and bool(
        re.search(r"\d", text)
    )


def _day(word: str) -> str:
    """`4th` -> `4`, `july` -> `jul`."""
    match = re.fullmatch(r"(\d+)(?:st|nd|rd|th)?", word)
    if match is not None:
        return match[1]
    return word[:3] if word in MONTHS else word
