"""The table of rules: every example of it."""

import pytest

from pacs_megatron.rewards.mathematics import compare, read_gold
from pacs_megatron.rewards.mathematics.rules import RULES

PAIRS = []
for _rule in RULES:
    for _expected, _pairs in ((True, _rule.right), (False, _rule.wrong)):
        for _gold, _answer in _pairs:
            _id = f"{_rule.name}: {_gold} | {_answer}"
            PAIRS.append(pytest.param(_gold, _answer, _expected, id=_id))


@pytest.mark.parametrize(("gold", "answer", "expected"), PAIRS)
def test_example(gold: str, answer: str, expected: bool) -> None:
    assert compare(read_gold(gold), answer, 60.0).is_right is expected
