"""Values of expressions, against sympy."""

import random
from collections.abc import Callable

import pytest
import sympy

from pacs_megatron.rewards.mathematics.expression import Node, UnreadableError, parse
from pacs_megatron.rewards.mathematics.spelling import plain
from pacs_megatron.rewards.mathematics.value import NoValueError, equal, proportional, value

Built = tuple[str, sympy.Expr]
UNARY: tuple[tuple[str, Callable[[sympy.Expr], sympy.Expr]], ...] = (
    (r"\sqrt{{{}}}", sympy.sqrt),
    (r"\sin\left({}\right)", sympy.sin),
    (r"\cos({})", sympy.cos),
    (r"e^{{{}}}", sympy.exp),
    (r"\ln\left({}\right)", sympy.log),
    (r"\left|{}\right|", sympy.Abs),
    (r"-\left({}\right)", lambda part: -part),
)
BINARY: tuple[tuple[str, Callable[[sympy.Expr, sympy.Expr], sympy.Expr]], ...] = (
    ("{}+({})", lambda left, right: left + right),
    ("{}-({})", lambda left, right: left - right),
    (r"({})\cdot({})", lambda left, right: left * right),
    (r"({})({})", lambda left, right: left * right),
    (r"\frac{{{}}}{{{}}}", lambda left, right: left / right),
)


def built(source: random.Random, depth: int) -> Built:
    """A random expression without variables, as LaTeX and for sympy."""
    if depth == 0:
        kind = source.randrange(4)
        if kind == 0:
            return r"\pi", sympy.pi
        if kind == 1:
            digits = source.randrange(1, 100)
            return f"{digits / 10}", sympy.Rational(digits, 10)
        number = source.randrange(1, 12)
        return str(number), sympy.Integer(number)
    if source.random() < 0.4:
        template, operation = UNARY[source.randrange(len(UNARY))]
        text, part = built(source, depth - 1)
        return template.format(text), operation(part)
    template, combine = BINARY[source.randrange(len(BINARY))]
    left_text, left = built(source, depth - 1)
    right_text, right = built(source, depth - 1)
    return template.format(left_text, right_text), combine(left, right)


@pytest.mark.parametrize("seed", range(40))
def test_random_constants_have_sympys_value(seed: int) -> None:
    source = random.Random(seed)
    wanted = complex("nan")
    while not 1e-6 < abs(wanted) < 1e6:  # also false for no number
        text, expected = built(source, 3)
        if expected.is_finite:
            wanted = complex(expected.evalf(30))
    found = complex(value(node(text)))
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12), text


def node(text: str) -> Node:
    return parse(plain(text))


@pytest.mark.parametrize(
    "text",
    [
        *("10^{10^{10^{10}}}", "9^{9^{9}}!", r"\sin(10^{10^{10}})", "1/0", "0^{-1}", r"\ln 0"),
        *(r"\sqrt[0]{2}", "(-1)!", "0/0", r"\gcd(1/2,3)"),
    ],
)
def test_no_value(text: str) -> None:
    with pytest.raises(NoValueError):
        value(node(text))


@pytest.mark.parametrize("text", ["5!!!", "3 4", "2^", "(", "1..2", "x2", "+", r"\frac{1}", "5(2"])
def test_unreadable(text: str) -> None:
    with pytest.raises(UnreadableError):
        node(text)


def test_cancellation_is_no_difference_and_a_small_number_is_one() -> None:
    assert equal(node("0"), node(r"\sqrt2+\sqrt3-\sqrt{5+2\sqrt6}"))
    assert not equal(node("0"), node("e^{-1000}"))
    assert not equal(node("10^{-60}"), node(r"2\cdot 10^{-60}"))


def test_proportional() -> None:
    assert proportional(node("x-2y"), node("4y-2x"))
    assert not proportional(node("x-2y"), node("4y-2x"), sign=True)
    assert not proportional(node("x-2y"), node("x+2y"))
    assert not proportional(node("x-2y"), node("x(x-2y)"))
