"""The table of spellings: every example of it, and texts that no rule may break."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.rewards.mathematics.spelling import SPELLINGS, plain

EXAMPLES = []
for _rule in SPELLINGS:
    for _text, _expected in _rule.examples:
        EXAMPLES.append(pytest.param(_text, _expected, id=f"{_rule.name}: {_text}"))


@pytest.mark.parametrize(("text", "expected"), EXAMPLES)
def test_example(text: str, expected: str) -> None:
    assert plain(text) == expected


@given(st.text(max_size=80))
def test_any_text_has_a_plain_form(text: str) -> None:
    assert isinstance(plain(text), str)


@given(st.integers(min_value=-(10**30), max_value=10**30))
def test_an_integer_is_its_own_plain_form(number: int) -> None:
    assert plain(str(number)) == str(number)
