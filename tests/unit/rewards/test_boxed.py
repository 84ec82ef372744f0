import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.rewards.boxed import boxed_answer, last_boxed


def test_last_box_wins():
    assert last_boxed(r"\boxed{1} no: \boxed{ 2 } done") == "2"


def test_nested_braces():
    assert last_boxed(r"\boxed{\frac{1}{\sqrt{2}}}") == r"\frac{1}{\sqrt{2}}"


def test_escaped_braces_do_not_count():
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"


def test_nested_box_gives_the_inner_one():
    assert last_boxed(r"\boxed{\boxed{5}}") == "5"


def test_unclosed_last_box_falls_back_to_the_last_complete_one():
    assert last_boxed(r"\boxed{7} and then \boxed{\frac{1}{2") == "7"


def test_no_box():
    assert last_boxed("the answer is 5") is None
    assert last_boxed(r"\boxed{5") is None


@given(st.text(alphabet="\\{}boxed5 ", max_size=60))
def test_any_text_gives_balanced_content_or_none(text):
    content = last_boxed(text)
    assert content is None or content in text


@given(st.text(alphabet="0123456789+-x", max_size=20), st.text(max_size=40))
def test_appended_box_is_found(content, before):
    assert last_boxed(f"{before.rstrip(chr(92))}\\boxed{{{content}}}.") == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"$\boxed 5$", "5"),
        (r"$\boxed\pi$", r"\pi"),
        (r"$\fbox{5}$", "5"),
        (r"\\boxed{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{5\\}", "5\\\\"),
    ],
)
def test_spellings_of_boxes(text: str, content: str) -> None:
    assert last_boxed(text) == content
    assert boxed_answer(text) == content


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"$\boxed{3}$ and $\boxed{4}$", "3, 4"),
        (r"\boxed{3}, \boxed{4}, \boxed{5}", "3, 4, 5"),
        (r"\boxed{3} or \boxed{4}", r"3 \text{ or } 4"),
        (r"\boxed{5}, \boxed{5}", "5"),
        (r"\boxed{3}. No: \boxed{4}", "4"),
        ("\\boxed{3}\n\n\\boxed{4}", "4"),
        (r"\boxed{5\}$.", "5"),
        (r"\boxed{4} or rather \boxed{5\}.", "5"),
        (r"\boxed{\{5\}", None),
        (r"\boxed{5", None),
        ("5", None),
    ],
)
def test_boxes_side_by_side_are_one_list(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@pytest.mark.parametrize("piece", ["\\boxed{", "\\boxed{5},", "\\boxed{\\{", "{", "\\boxed{}{"])
def test_time_is_linear_in_the_number_of_boxes(piece: str) -> None:
    """Ten times the text takes at most thirty times as long; a quadratic search takes a hundred."""
    seconds = []
    for count in (4_000, 40_000):
        best_s = float("inf")
        for _ in range(3):
            started = time.process_time()
            boxed_answer(piece * count)
            last_boxed(piece * count)
            best_s = min(best_s, time.process_time() - started)
        seconds.append(best_s)
    assert seconds[1] < 30 * seconds[0] + 0.05
