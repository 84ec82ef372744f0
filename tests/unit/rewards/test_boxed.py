from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.rewards.boxed import last_boxed


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
