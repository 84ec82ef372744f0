"""Diversity against a plain double loop, and what is left out of it."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from pacs_megatron.errors import DataError
from pacs_megatron.evaluation.diversity import diversity


def letters(texts: Sequence[str]) -> np.ndarray:
    return np.array([[text.count(letter) for letter in "abc"] for text in texts], dtype=np.float32)


def plain(texts: Sequence[str]) -> float:
    distances = []
    for left, right in itertools.combinations(letters(texts).tolist(), 2):
        dot = sum(x * y for x, y in zip(left, right, strict=True))
        distances.append(1 - dot / math.hypot(*left) / math.hypot(*right))
    return sum(distances) / len(distances)


def test_equals_a_plain_double_loop_averaged_over_questions() -> None:
    one, two = ["aab", "abc", "ccb", "a"], ["b", "bc"]
    result = diversity({"q1": one, "q2": two}, letters)
    assert result.mean == pytest.approx((plain(one) + plain(two)) / 2, abs=1e-7)
    assert (result.num_questions, result.num_excluded) == (2, 0)


def test_same_and_orthogonal_and_opposite() -> None:
    assert diversity({"q": ["ab", "aabb"]}, letters).mean == pytest.approx(0.0, abs=1e-12)
    assert diversity({"q": ["a", "b"]}, letters).mean == pytest.approx(1.0)
    assert diversity({"q": ["a", "b"]}, lambda _: np.array([[1.0, 0.0], [-3.0, 0.0]])).mean == pytest.approx(2.0)


def test_questions_with_fewer_than_two_correct_are_counted_not_averaged() -> None:
    result = diversity({"q1": ["a", "b"], "q2": ["a"], "q3": []}, letters)
    assert (result.mean, result.num_questions, result.num_excluded) == (pytest.approx(1.0), 1, 2)
    nothing = diversity({"q": ["a"]}, letters)
    assert (nothing.mean, nothing.num_questions, nothing.num_excluded) == (None, 0, 1)


@pytest.mark.parametrize(
    ("vectors", "complaint"),
    [
        (np.ones((3, 2)), r"shape \(3, 2\), expected \(2, dimension\)"),
        (np.ones(2), "shape"),
        (np.array([[1.0, 0.0], [0.0, 0.0]]), "zero or not finite"),
        (np.array([[1.0, 0.0], [np.nan, 0.0]]), "zero or not finite"),
    ],
)
def test_embeddings_that_cannot_be_compared_are_refused(vectors: np.ndarray, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        diversity({"question 7": ["a", "b"]}, lambda _: vectors)
