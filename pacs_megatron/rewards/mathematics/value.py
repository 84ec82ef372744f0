"""Values of expressions: exact rational numbers where possible, else 50 digits; both with limits,
so that no expression takes long.

Two expressions are equal if their values are: exactly for rational numbers, to 30 digits for other
constants, and at several points for expressions with variables.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from mpmath import mp

from pacs_megatron.rewards.mathematics.expression import Node, variables

_DIGITS = 50
_MORE_DIGITS = 120
_TOLERANCE_DIGITS = 30
_MAX_BITS = 200_000
"""of an exact number"""
_MAX_EXPONENT_BITS = 60
"""of the exponent of a number with 50 digits"""
_MAX_FACTORIAL = 20_000
_MAX_INTEGER_BITS = 4_000
"""of a number whose fraction, sine or divisor counts"""
_MIN_DIGITS = 6
"""significant digits from which a rounded decimal equals a number that has no end"""
_FLOAT_DIGITS = 15
_POINTS: tuple[tuple[str, ...], ...] = (
    ("integer",),
    ("integer",),
    ("positive",),
    ("positive",),
    ("real",),
    ("real",),
)
Number = Any
"""A Fraction, or mpmath's mpf or mpc"""
Point = Mapping[str, Number]


class NoValueError(ArithmeticError):
    """The expression has no value: a division by zero, or a number above the limits."""


# ---------------------------------------------------------------------------------------- equality
def equal(left: Node, right: Node) -> bool:
    """Whether two expressions have the same value wherever the left one is defined."""
    names = sorted(variables(left) | variables(right))
    if not names:
        return _equal_constants(left, right)
    # `log` without a base is natural or decimal; both sides mean the same.
    return any(_equal_at_points(left, right, names, base) for base in _log_bases(left, right))


def proportional(left: Node, right: Node, *, sign: bool = False) -> bool:
    """Whether left = c right with a constant c, not 0; with `sign`, c > 0."""
    names = sorted(variables(left) | variables(right))
    if not names:
        return False
    ratios = []
    for point in points(names):
        try:
            first = value_at(left, point)
            second = value_at(right, point)
            if _is_zero(first) or _is_zero(second):
                continue
            ratio = _divide(first, second)
        except NoValueError:
            continue
        if _is_real(first) and not _is_real(second):
            return False
        ratios.append(ratio)
    if len(ratios) < 3 or not all(_close(ratios[0], ratio) for ratio in ratios[1:]):
        return False
    return not sign or (_is_real(ratios[0]) and mp.re(_float(ratios[0])) > 0)


def value(node: Node, log_base: Any = None) -> Number:
    """The value of a constant. Raises NoValueError."""
    return value_at(node, {}, log_base=log_base)


def is_below(left: Node, right: Node) -> bool:
    """left < right for real constants. Raises NoValueError."""
    first = value(left)
    second = value(right)
    if not (_is_real(first) and _is_real(second)):
        raise NoValueError("not real")
    with mp.workdps(_DIGITS):
        return bool(mp.re(_float(first)) < mp.re(_float(second)))


def _equal_constants(left: Node, right: Node) -> bool:
    for base in _log_bases(left, right):
        try:
            first = value(left, base)
            second = value(right, base)
        except NoValueError:
            continue
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            if first == second:
                return True
        elif _close(first, second) or _close_at_more_digits(left, right, base, first, second):
            return True
        if _rounds_to(left, first, second) or _rounds_to(right, second, first):
            return True
    return False


def _close_at_more_digits(
    left: Node, right: Node, base: Any, first: Number, second: Number
) -> bool:
    """Whether a small difference is rounding: then it shrinks with more digits."""
    with mp.workdps(_DIGITS):
        difference = abs(_float(first) - _float(second))
        if not difference < mp.mpf(10) ** -25:
            return False
    with mp.workdps(_MORE_DIGITS):
        exact = abs(
            _float(value_at(left, {}, _MORE_DIGITS, base))
            - _float(value_at(right, {}, _MORE_DIGITS, base))
        )
        return bool(exact <= difference * mp.mpf(10) ** -30)


def _rounds_to(literal: Node, decimal: Number, other: Number) -> bool:
    """Whether a decimal with many digits is the other number, rounded.

    From 6 digits on for numbers without an end, such as 1/3 or a root; from 15 digits on (a float
    of 64 bits) for all.
    """
    node = literal.parts[0] if literal.kind == "negative" else literal
    digits, places = _written(node)
    if digits < _MIN_DIGITS or not isinstance(decimal, Fraction) or not _is_real(other):
        return False
    with mp.workdps(_DIGITS):
        difference = abs(_float(decimal) - mp.re(_float(other)))
        if digits >= _FLOAT_DIGITS:
            return bool(difference <= abs(_float(decimal)) * mp.mpf(10) ** (1 - _FLOAT_DIGITS))
        if isinstance(other, Fraction) and _has_end(other):
            return False
        return bool(difference <= mp.mpf(10) ** -places * mp.mpf("0.5000001"))


def _written(node: Node) -> tuple[int, int]:
    """(significant digits, places after the point) of a decimal, `2.5·10^{-3}` included; else 0."""
    if node.kind == "number":
        return node.digits, node.places
    if node.kind == "·" and node.parts[0].kind == "number" and node.parts[1].kind == "^":
        base, exponent = node.parts[1].parts
        if base.kind == "number" and base.value == 10:
            sign = -1 if exponent.kind == "negative" else 1
            power = exponent.parts[0] if exponent.kind == "negative" else exponent
            if power.kind == "number" and power.value.denominator == 1:
                first = node.parts[0]
                return first.digits, first.places - sign * int(min(power.value, 10**6))
    return 0, 0


def _has_end(number: Fraction) -> bool:
    """Whether its decimal ends."""
    bottom = number.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom == 1


def _equal_at_points(left: Node, right: Node, names: Sequence[str], base: Any) -> bool:
    num_equal = 0
    is_complex = _has_constant(left, "i") or _has_constant(right, "i")
    for point in points(names):
        try:
            first = value_at(left, point, log_base=base)
        except NoValueError:
            continue
        if not is_complex and not _is_real(first):
            continue
        try:
            second = value_at(right, point, log_base=base)
        except NoValueError:
            return False
        if not _close(first, second):
            return False
        num_equal += 1
    return num_equal >= 2


def points(names: Sequence[str]) -> list[dict[str, Number]]:
    """Fixed values for the variables: integers, positive and other numbers."""
    made = []
    for number, (kind,) in enumerate(_POINTS):
        point: dict[str, Number] = {}
        for index, name in enumerate(names):
            # The digits of an irrational rotation: far apart, and the same in every process.
            part = Fraction((7919 * (index + 1) + 104_729 * (number + 1)) % 9973, 9973)
            if kind == "integer":
                point[name] = Fraction(3 + (index * 5 + number * 4) % 23 + index)
            elif kind == "positive":
                point[name] = Fraction(1, 7) + 2 * part
            else:
                is_negative = (index + number) % 2 == 0
                point[name] = (Fraction(1, 9) + 3 * part) * (-1 if is_negative else 1)
        made.append(point)
    return made


def _log_bases(left: Node, right: Node) -> tuple[Any, ...]:
    has_plain_log = _has_plain_log(left) or _has_plain_log(right)
    return (None, Fraction(10)) if has_plain_log else (None,)


def _has_plain_log(node: Node) -> bool:
    if node.kind == "function" and node.value == "log" and len(node.parts) == 1:
        return True
    return any(_has_plain_log(part) for part in node.parts)


def _has_constant(node: Node, name: str) -> bool:
    if node.kind == "constant" and node.value == name:
        return True
    return any(_has_constant(part, name) for part in node.parts)


# -------------------------------------------------------------------------------------- evaluation
def value_at(node: Node, point: Point, digits: int = _DIGITS, log_base: Any = None) -> Number:
    """The value with these values of the variables. Raises NoValueError."""
    with mp.workdps(digits):
        try:
            result = _evaluate(node, point, log_base)
        except (ArithmeticError, ValueError, TypeError, OverflowError, MemoryError) as error:
            raise NoValueError(str(error)) from error
        except mp.NoConvergence as error:
            raise NoValueError(str(error)) from error
    if not isinstance(result, Fraction) and mp.isnan(result):
        raise NoValueError("not a number")
    return result


def _evaluate(node: Node, point: Point, log_base: Any) -> Number:
    if node.kind == "number":
        return node.value
    if node.kind == "variable":
        return point[node.value]
    if node.kind == "constant":
        return {"π": mp.pi, "e": mp.e, "i": mp.j, "∞": mp.inf}[node.value] * 1

    parts = [_evaluate(part, point, log_base) for part in node.parts]
    if node.kind == "function":
        if node.value == "log" and len(parts) == 1 and log_base is not None:
            parts.append(log_base)
        return _FUNCTIONS[node.value](*parts)
    return _OPERATIONS[node.kind](*parts)


def _float(number: Number) -> Any:
    """mpmath's number."""
    if isinstance(number, Fraction):
        return mp.mpf(number.numerator) / mp.mpf(number.denominator)
    return number


def _checked(number: Number) -> Number:
    """The number. Raises NoValueError above the limits."""
    if isinstance(number, Fraction):
        if max(number.numerator.bit_length(), number.denominator.bit_length()) > _MAX_BITS:
            return _checked(_float(number))
        return number
    if mp.isfinite(number) and number and abs(mp.mag(number)) > 2**_MAX_EXPONENT_BITS:
        raise NoValueError("too large or too small")
    return number


def _arithmetic(operation: Callable[[Any, Any], Any]) -> Callable[[Number, Number], Number]:
    def apply(left: Number, right: Number) -> Number:
        if not (isinstance(left, Fraction) and isinstance(right, Fraction)):
            left = _float(left)
            right = _float(right)
        return _checked(operation(left, right))

    return apply


def _divide(left: Number, right: Number) -> Number:
    if right == 0:
        raise NoValueError("a division by zero")
    return _arithmetic(lambda a, b: a / b)(left, right)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        if base == 0 and exponent <= 0:
            if exponent < 0:
                raise NoValueError("a division by zero")
            return Fraction(1)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) <= _MAX_BITS:
            return base ** int(exponent)
    if base == 0:
        if _is_real(exponent) and mp.re(_float(exponent)) > 0:
            return Fraction(0)
        raise NoValueError("a power of zero")
    power = _float(exponent)
    root = _float(base)
    if not mp.isfinite(power) or not mp.isfinite(root):
        return root**power
    if abs(power) * (abs(mp.mag(root)) + 1) > mp.mpf(2) ** _MAX_EXPONENT_BITS:
        raise NoValueError("too large or too small")
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return _checked(root ** int(exponent))
    return _checked(mp.power(root, power))


def _root(inside: Number, degree: Number) -> Number:
    if degree == 0:
        raise NoValueError("a root of degree 0")
    is_odd = isinstance(degree, Fraction) and degree.denominator == 1 and degree.numerator % 2 == 1
    if is_odd and _is_real(inside) and mp.re(_float(inside)) < 0:
        return -_power(-inside, 1 / degree)
    return _power(inside, _divide(Fraction(1), degree))


def _factorial(number: Number) -> Number:
    if isinstance(number, Fraction) and number.denominator == 1:
        if number < 0:
            raise NoValueError("a factorial of a negative number")
        if number <= _MAX_FACTORIAL:
            return Fraction(math.factorial(int(number)))
    return _checked(mp.gamma(_small(number) + 1))


def _double_factorial(number: Number) -> Number:
    integer = _integer(number)
    if not -1 <= integer <= 1000:
        raise NoValueError("too large")
    return Fraction(math.prod(range(integer, 0, -2)))


def _small(number: Number) -> Any:
    """mpmath's number. Raises NoValueError above the limit of functions."""
    result = _float(number)
    if mp.isfinite(result) and result and mp.mag(result) > _MAX_EXPONENT_BITS:
        raise NoValueError("too large")
    return result


def _integer(number: Number) -> int:
    if not isinstance(number, Fraction) or number.denominator != 1:
        raise NoValueError("not an integer")
    if number.numerator.bit_length() > _MAX_INTEGER_BITS:
        raise NoValueError("too large")
    return int(number)


def _binomial(top: Number, bottom: Number) -> Number:
    are_integers = all(isinstance(n, Fraction) and n.denominator == 1 for n in (top, bottom))
    if are_integers and 0 <= bottom <= top <= _MAX_FACTORIAL:
        return Fraction(math.comb(int(top), int(bottom)))
    return _checked(mp.binomial(_small(top), _small(bottom)))


def _permutations(top: Number, bottom: Number) -> Number:
    first = _integer(top)
    second = _integer(bottom)
    if not 0 <= second <= first <= _MAX_FACTORIAL:
        raise NoValueError("no permutations")
    return Fraction(math.perm(first, second))


def _log(number: Number, base: Number = None) -> Number:
    if number == 0 or base == 1:
        raise NoValueError("no logarithm")
    if base is None:
        return mp.log(_float(number))
    return mp.log(_float(number)) / mp.log(_float(base))


def _abs(number: Number) -> Number:
    return abs(number)


def _floor(number: Number) -> Number:
    if isinstance(number, Fraction):
        return Fraction(math.floor(number))
    return Fraction(int(mp.floor(_real(_small(number)))))


def _ceil(number: Number) -> Number:
    return -_floor(-number)


def _real(number: Any) -> Any:
    if not _is_real(number):
        raise NoValueError("not real")
    return mp.re(number)


def _least(*numbers: Number) -> Number:
    return min(numbers, key=lambda number: _real(_float(number)))


def _greatest(*numbers: Number) -> Number:
    return max(numbers, key=lambda number: _real(_float(number)))


def _of_float(function: Callable[[Any], Any]) -> Callable[[Number], Number]:
    return lambda number: _checked(function(_small(number)))


_OPERATIONS: dict[str, Callable[..., Number]] = {
    "+": _arithmetic(lambda a, b: a + b),
    "-": _arithmetic(lambda a, b: a - b),
    "·": _arithmetic(lambda a, b: a * b),
    "/": _divide,
    "^": _power,
    "negative": lambda number: -number,
}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "!": _factorial,
    "!!": _double_factorial,
    "root": _root,
    "abs": _abs,
    "floor": _floor,
    "ceil": _ceil,
    "binomial": _binomial,
    "permutations": _permutations,
    "log": _log,
    "ln": _log,
    "exp": lambda number: _power(mp.e * 1, number),
    "gcd": lambda *numbers: Fraction(math.gcd(*map(_integer, numbers))),
    "lcm": lambda *numbers: Fraction(math.lcm(*map(_integer, numbers))),
    "max": _greatest,
    "min": _least,
    "arg": _of_float(mp.arg),
    "Re": _of_float(mp.re),
    "Im": _of_float(mp.im),
    "sin": _of_float(mp.sin),
    "cos": _of_float(mp.cos),
    "tan": _of_float(mp.tan),
    "cot": _of_float(mp.cot),
    "sec": _of_float(mp.sec),
    "csc": _of_float(mp.csc),
    "sinh": _of_float(mp.sinh),
    "cosh": _of_float(mp.cosh),
    "tanh": _of_float(mp.tanh),
    "coth": _of_float(mp.coth),
    "arcsin": _of_float(mp.asin),
    "arccos": _of_float(mp.acos),
    "arctan": _of_float(mp.atan),
    "arccot": _of_float(mp.acot),
    "asin": _of_float(mp.asin),
    "acos": _of_float(mp.acos),
    "atan": _of_float(mp.atan),
}


# --------------------------------------------------------------------------------------- comparison
def _close(left: Number, right: Number) -> bool:
    """Equal exactly, or to 30 digits."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    with mp.workdps(_DIGITS):
        first = _float(left)
        second = _float(right)
        if first == second:
            return True
        if not (mp.isfinite(first) and mp.isfinite(second)):
            return False
        largest = max(abs(first), abs(second))
        return bool(abs(first - second) <= largest * mp.mpf(10) ** -_TOLERANCE_DIGITS)


def _is_zero(number: Number) -> bool:
    if isinstance(number, Fraction):
        return number == 0
    return bool(abs(number) < mp.mpf(10) ** -_TOLERANCE_DIGITS)


def _is_real(number: Number) -> bool:
    if isinstance(number, Fraction):
        return True
    imaginary = abs(mp.im(number))
    return bool(
        imaginary <= max(abs(mp.re(number)), mp.mpf(10) ** -20) * mp.mpf(10) ** -_TOLERANCE_DIGITS
    )
