from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.arithmetic import judge, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", Fraction(12)),
        ("-1,234", Fraction(-1234)),
        ("14,\\!641", Fraction(14641)),
        ("3.50", Fraction(7, 2)),
        (".25", Fraction(1, 4)),
        ("7/2", Fraction(7, 2)),
        ("-\\frac{7}{2}", Fraction(-7, 2)),
        ("\\dfrac{-7}{2}", Fraction(-7, 2)),
        ("-\\frac{-7}{2}", Fraction(7, 2)),
        ("$ 025 $", Fraction(25)),
        ("+5", Fraction(5)),
        ("\u22125", Fraction(-5)),
    ],
)
def test_numbers(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text", ["", "x", "1/0", "1e9", "1,23", "2^3", "--5", "5.", "\\frac{1}{x}", "9" * 401, "\u0663"]
)
def test_not_numbers(text):
    assert parse_number(text) is None


@given(st.fractions())
def test_any_fraction_round_trips(value):
    assert parse_number(f"{value.numerator}/{value.denominator}") == value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6))
def test_decimals_are_exact(value):
    assert parse_number(f"{value:f}") == Fraction(value)


def test_reward(make_prompt):
    assert judge(make_prompt("0.5"), r"first \boxed{3}, so \boxed{\frac{1}{2}}") == 1.0
    assert judge(make_prompt("0.5"), r"so \boxed{0.50000001}") == 0.0
    assert judge(make_prompt("0.5"), r"so \boxed{a half}") == 0.0
    assert judge(make_prompt("0.5"), "0.5") == 0.0


def test_unreadable_gold_is_an_error_even_for_an_equal_answer(make_prompt):
    with pytest.raises(RewardError, match=r"'x\+1' of prompt train/7"):
        judge(make_prompt("x+1"), r"\boxed{x+1}")
