import re
from fractions import Fraction

import numpy as np
import pytest

from pacs_megatron.agents.calculator import calculate
from pacs_megatron.errors import ToolError

VALUES = {
    "6 * 7": "42",
    "12,345 + 1": "12346",
    "2 + 3 * 4 - 5": "9",
    "(2 + 3) * 4": "20",
    "7 / 2": "3.5",
    "1 / 3": "0.333333333333",
    "-2 / 3": "-0.666666666667",
    "0.1 + 0.2": "0.3",
    "7 // 2": "3",
    "-7 // 2": "-4",
    "-7 % 3": "2",
    "2 ** 10": "1024",
    "2 ^ 10": "1024",
    "-2 ** 2": "-4",
    "(-2) ** 2": "4",
    "2 ** 3 ** 2": "512",
    "2 ** -1": "0.5",
    "--3": "3",
    "3 × 4 ÷ 6 − 1": "1",
    ".5 + 5.": "5.5",
    " 1\n+\t1 ": "2",
}
ERRORS = {
    "": "an empty expression",
    "   ": "an empty expression",
    "1 +": "ends too early",
    "(1": "ends too early",
    "(1 2": "a bracket is not closed",
    "1 2": "unexpected '2'",
    ")": "unexpected ')'",
    "1 / 0": "division by zero",
    "1 // (2 - 2)": "division by zero",
    "1 % 0": "division by zero",
    "0 ** -1": "division by zero",
    "2 ** 0.5": "an exponent that is no integer",
    "9 ** 9 ** 9": "too large",
    "10 ** 1024 * 10 ** 1024": "too large",
    "9" * 501: "501 characters",
    "(" * 60 + "1" + ")" * 60: "nested",
    "2" + "**1" * 60: "nested",
    "__import__('os')": "unexpected '_'",
    "1\x00": "unexpected '\\x00'",
    "1e9": "unexpected 'e'",
    "x": "unexpected 'x'",
    "٣": "unexpected",
}


@pytest.mark.parametrize("expression", VALUES)
def test_a_value(expression):
    assert calculate(expression) == VALUES[expression]


@pytest.mark.parametrize("expression", ERRORS)
def test_an_expression_without_value(expression):
    with pytest.raises(ToolError, match=re.escape(ERRORS[expression])):
        calculate(expression)


@pytest.mark.parametrize("expression", [5, None, ["1"], b"1"])
def test_no_text(expression):
    with pytest.raises(ToolError, match="expected text"):
        calculate(expression)


def test_random_expressions_equal_exact_fractions():
    """The reference builds the value while it writes the expression."""
    generator = np.random.default_rng(0)

    def expression(depth):
        if depth == 0:
            number = int(generator.integers(1, 50))
            return str(number), Fraction(number)
        left, left_value = expression(depth - 1)
        right, right_value = expression(depth - 1)
        operator = "+-*/"[generator.integers(4)]
        if operator == "/" and right_value == 0:
            operator = "+"
        value = {
            "+": left_value + right_value,
            "-": left_value - right_value,
            "*": left_value * right_value,
        }
        result = left_value / right_value if operator == "/" else value[operator]
        return f"({left} {operator} {right})", result

    for _ in range(300):
        text, value = expression(3)
        shown = Fraction(calculate(text))
        assert shown == value or abs(shown - value) <= Fraction(1, 2 * 10**12)
