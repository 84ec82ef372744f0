r"""Sums, products, integrals, limits and derivatives, by math-verify (sympy).

sympy may compute for hours, and no signal ends a computation with large integers. Each comparison
runs in a forked child, which is killed at its limit of CPU time or wall clock. Only math-verify's
LaTeX grammar is used, because its grammar for plain expressions evaluates the text as Python.
"""

import contextlib
import logging
import math
import os
import re
import resource
import select
import signal
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)
_OPERATORS = re.compile(r"\\(?:sum|prod|int|iint|oint|lim|partial|nabla)(?![A-Za-z])|\\frac\{d")
_PLAIN_SIGNS = {
    "≤": r"\leq ",
    "≥": r"\geq ",
    "≠": r"\neq ",
    "·": r"\cdot ",
    "×": r"\times ",
    "÷": r"\div ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "→": r"\to ",
    "⦃": r"\{",
    "⦄": r"\}",
    "±": r"\pm ",
    "∪": r"\cup ",
    "…": r"\ldots ",
    "°": r"^{\circ}",
    '"': "",
}
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off


_WALL = 2.0
"""wall-clock limit, in CPU-time limits"""


class TimeLimitError(Exception):
    """sympy did not end in time, or died."""


def is_needed(gold: str, answer: str) -> bool:
    """Whether one of two plain forms has an operator that expression.py does not read."""
    return bool(_OPERATORS.search(gold) or _OPERATORS.search(answer))


@lru_cache(maxsize=1024)
def is_readable(text: str, time_limit_s: float) -> bool:
    """Whether math-verify reads a gold answer."""
    try:
        return _limited(lambda: bool(_parse(text)), time_limit_s)
    except TimeLimitError:
        return False


def is_equal(gold: str, answer: str, time_limit_s: float) -> bool:
    """Whether math-verify finds two plain forms equal.

    Raises TimeLimitError if the gold answer alone takes too long; an answer that does is wrong.
    """
    try:
        return _limited(lambda: _verify(gold, answer), time_limit_s)
    except TimeLimitError:
        if not _gold_ends(gold, time_limit_s):
            raise
        return False


@lru_cache(maxsize=1024)
def _gold_ends(gold: str, time_limit_s: float) -> bool:
    """Whether math-verify compares the gold answer with itself within the limit."""
    try:
        _limited(lambda: _verify(gold, gold), time_limit_s)
    except TimeLimitError:
        return False
    return True


def _verify(gold: str, answer: str) -> bool:
    first = _parse(gold)
    second = _parse(answer)
    if not first or not second:
        return False
    return bool(verify(first, second, timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    for sign, command in _PLAIN_SIGNS.items():
        text = text.replace(sign, command)
    found: list[Any] = parse(
        f"\\boxed{{{text}}}", _LATEX, fallback_mode="no_fallback", parsing_timeout=None
    )
    return found


def _limited(compute: Callable[[], bool], time_limit_s: float) -> bool:
    """The result of `compute` in a child process. Raises TimeLimitError."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        result = b"?"
        try:
            # CPU time, so that a busy host does not decide.
            limit = math.ceil(time_limit_s)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            result = b"1" if compute() else b"0"
        finally:
            os.write(writer, result)
            os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], _WALL * time_limit_s)
        answer = os.read(reader, 1) if ready else b""
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if answer not in (b"0", b"1"):
        raise TimeLimitError
    return answer == b"1"
