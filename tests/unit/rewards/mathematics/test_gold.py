"""Which gold answers are fit to judge with."""

import pytest

from pacs_megatron.rewards.mathematics.gold import doubt, natural_answer


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        ("The result is 12", "sentence"),
        (r"\text{Answer: }7", "sentence"),
        ("(C) 8", "letter and a text"),
        ("n/a", "placeholder"),
        ("null", "placeholder"),
        ("12 500", "space between digits"),
        (r"1,2,4,\ldots,64", "not read"),
    ],
)
def test_doubtful(gold: str, reason: str) -> None:
    found = doubt(gold)
    assert found is not None and reason in found


@pytest.mark.parametrize(
    "gold",
    [
        *("7", "7.", "8:15", "35°", r"12~\mathrm{kg}", "–3", "C.", r"0.\overline{6}", "√5", "x+1"),
        *(r"\text{even}", r"1\,500", "(2,3)", "1e-06"),
    ],
)
def test_fine(gold: str) -> None:
    assert doubt(gold) is None


@pytest.mark.parametrize(
    ("gold", "natural"),
    [
        ("The result is 12", "12"),
        ("(C) 8", "C"),
        ("1e-06", r"\frac{1}{1000000}"),
        (r"x=-\frac12", r"-\frac{1}{2}"),
        (r"35\text{ cm}", "35"),
        (r"\sqrt2", None),
        ("2^{4950}", None),
        ("x+1", None),
        ("(2,3)", None),
    ],
)
def test_natural_answer(gold: str, natural: str | None) -> None:
    assert natural_answer(gold) == natural
