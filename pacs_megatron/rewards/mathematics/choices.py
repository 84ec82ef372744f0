"""Letters of multiple choice."""

import re

_CHOICE = re.compile(
    r"(?:(?i:(?:the |final |correct )*(?:option|choice|answers?)(?: is)?)\s*:?\s*)?"
    r"[(\[]?\s*(?P<letter>[A-Ja-j])\s*(?:(?P<mark>[)\].:])\s*(?P<rest>.*))?",
    re.DOTALL,
)
_OTHER = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])")
_HEDGE = re.compile(r"\b(?:or|and|not|nor)\b")
_MORE_LETTERS = re.compile(r"(?:[\s()\[\].:,;/&]*[A-J](?![A-Za-z]))+[\s()\[\].:]*")
"""behind a letter: `(A), (B)`"""
_SEVERAL = re.compile(r"[A-J](?:[,;]*[A-J])+")


def choice(plain: str) -> tuple[str, str] | None:
    """(letter, what stands behind it) of `B`, `(B)`, `B) 12`, `Option B`; None for other text."""
    text = plain.replace('"', " ").strip()
    text = re.sub(r"\s+", " ", text)
    match = _CHOICE.fullmatch(text)
    if match is None:
        match = re.fullmatch(r"(?P<mark>[(\[])(?P<letter>[A-J])[)\]]\s*(?P<rest>\S.*)", text)
    if match is None:
        return None
    letter = match["letter"]
    if letter.islower() and text != f"({letter})":
        return None
    rest = (match["rest"] or "").strip()
    if _OTHER.search(rest) and _HEDGE.search(rest):
        return None
    if _MORE_LETTERS.fullmatch(rest):
        return None
    return letter.upper(), rest


def letters(plain: str) -> str:
    """The letters of `A, C`, `ACD`, `A and C`, sorted; empty for other text."""
    text = re.sub(r"\band\b", ",", plain)
    text = re.sub(r'[\s()"]', "", text)
    if _SEVERAL.fullmatch(text) is None:
        return ""
    found = re.findall(r"[A-J]", text)
    return "".join(sorted(found)) if len(set(found)) == len(found) else ""
