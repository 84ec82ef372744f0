"""sympy in a child process: results, and what happens when it does not end."""

import time

import pytest

from pacs_megatron.rewards.mathematics import symbolic

SUM = r"\sum_{k=1}^{3} k"
HANG = r"\sum_{k=1}^{3} 9^{9^{9^{k}}}"


def test_sums_are_compared() -> None:
    assert symbolic.is_equal("6", SUM, 60.0)
    assert not symbolic.is_equal("7", SUM, 60.0)
    assert not symbolic.is_equal("7", r"\sum_{", 60.0)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """math-verify never ends with a text that has `9^{9`."""
    verify = symbolic._verify

    def hang(gold: str, answer: str) -> bool:
        while "9^{9" in gold + answer:
            time.sleep(3600)
        return verify(gold, answer)

    monkeypatch.setattr(symbolic, "_verify", hang)
    symbolic._gold_ends.cache_clear()


def test_an_answer_that_hangs_is_wrong(hanging: None) -> None:
    assert not symbolic.is_equal("6", HANG, 2.0)


def test_a_gold_answer_that_hangs_is_an_error(hanging: None) -> None:
    with pytest.raises(symbolic.TimeLimitError):
        symbolic.is_equal(HANG, "6", 0.5)


def test_a_child_that_dies_gives_no_result() -> None:
    with pytest.raises(symbolic.TimeLimitError):
        symbolic._limited(lambda: bool(1 / 0), 60.0)
