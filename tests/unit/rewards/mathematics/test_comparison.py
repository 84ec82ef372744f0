"""Rated pairs (gold answer, answer): `development.jsonl` was used to write the rules,
`second.jsonl` measured them before its misses changed them, `unseen.jsonl` only measured them.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.rewards.boxed import boxed_answer
from pacs_megatron.rewards.mathematics import compare, read_gold

FOLDER = Path(__file__).parents[3] / "data" / "mathematics"
LIMIT_S = 60.0
LEAST_RIGHT = 0.97
"""share of a whole file"""
LEAST_RIGHT_OF_KIND = 0.8
MAX_FALSE_ACCEPTS = 1 / 200


def pairs_of(name: str) -> list[tuple[str, str, str, bool]]:
    """(kind, gold answer, content of the box, whether it is right) of each line."""
    pairs = []
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        answer = row.get("answer")
        if answer is None:
            answer = boxed_answer(row["response"])
        pairs.append((row["kind"], row["gold"], answer or "", bool(row["right"])))
    return pairs


def is_right(gold: str, answer: str) -> bool:
    return bool(answer) and compare(read_gold(gold), answer, LIMIT_S).is_right


@pytest.mark.parametrize(("kind", "gold", "answer", "expected"), pairs_of("development.jsonl"))
def test_development_pair(kind: str, gold: str, answer: str, expected: bool) -> None:
    assert is_right(gold, answer) is expected


@pytest.mark.parametrize("name", ["unseen.jsonl", "second.jsonl"])
def test_files_that_measure(name: str) -> None:
    counts: Counter[str] = Counter()
    right: Counter[str] = Counter()
    misses = []
    num_false_accepts = 0
    for kind, gold, answer, expected in pairs_of(name):
        counts[kind] += 1
        judged = is_right(gold, answer)
        if judged == expected:
            right[kind] += 1
        else:
            misses.append(f"{kind}: {gold} | {answer}: {judged}")
            num_false_accepts += judged
    print("\n".join(misses))
    assert right.total() >= LEAST_RIGHT * counts.total(), misses
    assert num_false_accepts <= MAX_FALSE_ACCEPTS * counts.total(), misses
    assert all(right[kind] >= LEAST_RIGHT_OF_KIND * counts[kind] for kind in counts), misses


def test_the_same_text_is_right() -> None:
    for _, gold, _, _ in pairs_of("unseen.jsonl"):
        assert is_right(gold, gold), gold


@given(st.text(alphabet="0123456789.,+-=()[]{}\\<>|^_!%$ abexyπ±∪√\"'", max_size=40))
def test_any_answer_is_compared_without_an_error(answer: str) -> None:
    for gold in ("5", "x^2+1", "[0,1)", "1,2", r"\text{even}", "B"):
        compare(read_gold(gold), answer, LIMIT_S)


@pytest.mark.parametrize("answer", ["(" * 1900, r"\frac{" * 300, "1+" * 900, "x" * 1500, "^" * 99])
def test_deep_and_long_answers_are_wrong(answer: str) -> None:
    assert not is_right("5", answer)


def test_the_comparison_has_what_was_read() -> None:
    result = compare(read_gold("40"), r"40\text{ cm}", LIMIT_S)
    assert result == (True, "number: 40", 'number: 40"cm"')
    assert compare(read_gold("1,2"), "3 4", LIMIT_S).answer == "not read: 3 4"
