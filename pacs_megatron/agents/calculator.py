"""A calculator: exact arithmetic over a small grammar, without Python's `eval`.

    sum      = product (("+" | "-") product)*
    product  = sign (("*" | "/" | "//" | "%") sign)*
    sign     = ("+" | "-") sign | power
    power    = atom ["**" sign | "^" sign]
    atom     = number | "(" sum ")"

Numbers are decimal, with an optional fraction and commas between thousands.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from pacs_megatron.errors import ToolError

_MAX_CHARS = 500
_MAX_DEPTH = 50
_MAX_BITS = 4096
"""Size of a numerator or denominator"""
_MAX_EXPONENT = 1024
_PLACES = 12
"""Digits after the point of a number that has no exact decimal form"""
_TOKEN = re.compile(r"\s*(?:(\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)|(\*\*|//|[-+*/%^()]))", re.ASCII)
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})


def calculate(expression: str) -> str:
    """The value of an expression: an integer, or a decimal number.

    Raises:
        ToolError: the expression is not in the grammar, divides by zero, or is too large.
    """
    if not isinstance(expression, str):
        raise ToolError(f"expression is {type(expression).__name__}, expected text")
    if len(expression) > _MAX_CHARS:
        raise ToolError(f"an expression of {len(expression)} characters, at most {_MAX_CHARS}")
    parser = _Parser(_tokens(expression.translate(_SPELLINGS)))
    value = parser.sum()
    if parser.next is not None:
        raise ToolError(f"unexpected {parser.next!r}")
    return _shown(value)


def _tokens(text: str) -> list[str]:
    tokens = []
    end = 0
    text = text.rstrip()
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None:
            raise ToolError(f"unexpected {text[end:].lstrip()[:1]!r}")
        tokens.append(match[1] or match[2])
        end = match.end()
    if not tokens:
        raise ToolError("an empty expression")
    return tokens


class _Parser:
    """Reads tokens from the left and computes at once."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    @property
    def next(self) -> str | None:
        """The next token; None at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def sum(self) -> Fraction:
        return self._chain(self._product, ("+", "-"))

    def _product(self) -> Fraction:
        return self._chain(self._sign, ("*", "/", "//", "%"))

    def _chain(self, operand: Callable[[], Fraction], operators: tuple[str, ...]) -> Fraction:
        """Operands with operators of one precedence, from the left."""
        value = operand()
        while self.next in operators:
            operator = self._take()
            value = _limited(_apply(operator, value, operand()))
        return value

    def _sign(self) -> Fraction:
        negative = False
        while self.next in ("+", "-"):
            negative ^= self._take() == "-"
        value = self._power()
        return -value if negative else value

    def _power(self) -> Fraction:
        base = self._atom()
        if self.next not in ("**", "^"):
            return base
        self._take()
        self._enter()
        exponent = self._sign()
        self._depth -= 1
        return _limited(_power_of(base, exponent))

    def _atom(self) -> Fraction:
        token = self._take()
        if token == "(":  # noqa: S105  no password
            self._enter()
            value = self.sum()
            self._depth -= 1
            if self._take() != ")":
                raise ToolError("a bracket is not closed")
            return value
        if not (token[0].isdigit() or token[0] == "."):
            raise ToolError(f"unexpected {token!r}")
        return _limited(Fraction(token.replace(",", "")))

    def _take(self) -> str:
        token = self.next
        if token is None:
            raise ToolError("the expression ends too early")
        self._at += 1
        return token

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ToolError(f"more than {_MAX_DEPTH} nested brackets or powers")


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if right == 0:
        raise ToolError("division by zero")
    if operator == "/":
        return left / right
    if operator == "//":
        return Fraction(left // right)
    return left % right


def _power_of(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("an exponent that is no integer")
    number = abs(int(exponent))
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    if number > _MAX_EXPONENT or number * _bits(base) > 2 * _MAX_BITS:
        raise ToolError("the value is too large")
    return base ** int(exponent)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _limited(value: Fraction) -> Fraction:
    """Raises ToolError for a value that is too large to compute with."""
    if _bits(value) > _MAX_BITS:
        raise ToolError("the value is too large")
    return value


def _shown(value: Fraction) -> str:
    """The value as an integer, an exact decimal number, or a rounded one."""
    if value.denominator == 1:
        return str(value.numerator)
    scale = 10**_PLACES
    scaled = round(value * scale)
    sign = "-" if scaled < 0 else ""
    whole, rest = divmod(abs(scaled), scale)
    digits = f"{rest:0{_PLACES}d}".rstrip("0")
    if not digits:
        return f"{sign}{whole}"
    return f"{sign}{whole}.{digits}"
