r"""The answer of a response: the content of its last complete `\boxed{...}`."""

import re
from typing import NamedTuple

_ONE_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*(\\[A-Za-z]+|[^\\\s{}$])")
"""`\\boxed 5` boxes one token"""
_MARKS = re.compile(r"\\+(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
"""a box with its brace, an escaped character, or a brace"""
_BETWEEN = re.compile(
    r"(?:[\s$,;~]|\\[,;:!() \[\]]|\\q?quad|\band\b|\bor\b|\\text\s*\{\s*,?\s*(?:and|or)\s*\})*"
)
"""text between boxes that are one list of answers"""
_OR = re.compile(r"\bor\b")
_MAX_LINE = 300
"""characters of a box that is closed by mistake"""


class Box(NamedTuple):
    """The content of one box, and its place in the text: [start, end)."""

    content: str
    start: int
    end: int


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces close, stripped; None if there is none.

    `\fbox{...}` and `\boxed 5` count too. Linear in len(text).
    """
    found, _ = _closed_boxes(text)
    return found[-1].content if found else None


def boxed_answer(text: str) -> str | None:
    r"""The final answer: the last box, or the list of the last boxes with only `and`, `or` or
    punctuation between them. None without a box.

    `\boxed{5\}` ends at the brace that was escaped by mistake.
    """
    found, last_open = _closed_boxes(text)
    if last_open is not None and (not found or last_open.end > found[-1].end):
        found += _closed_by_mistake(text, last_open)
    if not found:
        return None

    answers = [found[-1]]
    separators: list[str] = []
    for box in reversed(found[:-1]):
        between = text[box.end : answers[-1].start]
        if box.end > answers[-1].start:  # contains the next one
            continue
        if between.count("\n") > 1 or _BETWEEN.fullmatch(between) is None:
            break
        answers.append(box)
        separators.append(r" \text{ or } " if _OR.search(between) else ", ")

    contents = [box.content for box in reversed(answers)]
    if len(set(contents)) == 1:
        return contents[0]
    joined = contents[0]
    for separator, content in zip(reversed(separators), contents[1:], strict=True):
        joined += separator + content
    return joined


def _closed_boxes(text: str) -> tuple[list[Box], Box | None]:
    """The complete boxes in the order of their starts, and the last box that never closes."""
    found = []
    open_braces: list[tuple[int, int] | None] = []  # a box's start and the start of its content
    for match in _MARKS.finditer(text):
        mark = match[0]
        if mark == "{":
            open_braces.append(None)
        elif mark == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                content = text[box[1] : match.start()].strip()
                found.append(Box(content, box[0], match.end()))
        elif len(mark) > 2:
            open_braces.append(match.span())

    for match in _ONE_TOKEN.finditer(text):
        found.append(Box(match[1], match.start(), match.end()))
    last_open = None
    for span in open_braces:
        if span is not None:
            last_open = Box("", *span)
    return sorted(found, key=lambda box: box.start), last_open


def _closed_by_mistake(text: str, box: Box) -> list[Box]:
    r"""The box that starts at `box` and ends at a `\}` without `\{` in the same line, if any."""
    depth = 0
    for match in _MARKS.finditer(text, box.end):
        if "\n" in text[box.end : match.start()][:_MAX_LINE]:
            break
        depth += (match[0] == r"\{") - (match[0] == r"\}")
        if depth < 0:
            return [Box(text[box.end : match.start()].strip(), box.start, match.end())]
        if match.start() - box.end > _MAX_LINE:
            break
    return []
