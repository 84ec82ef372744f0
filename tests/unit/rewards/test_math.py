import pytest

from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.math import authors_rule, judge, last_box

EQUAL = [
    ("142", "142.0"),
    ("025", "25"),
    ("14,\\!641", "14641"),
    ("14641", "14,641"),
    ("10000", "10{,}000"),
    ("\\frac{14}{3}", "14/3"),
    ("0.5", "\\frac{1}{2}"),
    ("71^\\circ", "71"),
    ("13.5\\text{ pounds}", "13.5"),
    ("50", "\\$50"),
    ("83\\%", "83"),
    ("6x^2+4x-5", "-5+4x+6x^2"),
    ("27+21\\sqrt{3}", "21\\sqrt{3}+27"),
    ("1 \\pm \\sqrt{19}", "1+\\sqrt{19}, 1-\\sqrt{19}"),
    ("0, 1, 2, 4", "4, 2, 1, 0"),
    ("(3,5)", "\\left(3,5\\right)"),
    ("\\text{Evelyn}", "Evelyn"),
    ("x=5", "5"),
    ("\\begin{pmatrix}6\\\\3\\end{pmatrix}", "\\begin{bmatrix}6\\\\3\\end{bmatrix}"),
    ("\\cot x", "\\frac{\\cos x}{\\sin x}"),
    ("$\\frac{1}{2}$", "$0.5$"),
    ("So \\boxed{7}", "7"),
    ("40_9", "40_{9}"),
    ("40_9", "40"),
]
DIFFERENT = [
    ("5", "6"),
    ("\\frac{14}{3}", "4.67"),
    ("(2,8)", "[2,8]"),
    ("(2,8)", "(8,2)"),
    ("-i", "i"),
    ("B", "C"),
    ("\\text{Evelyn}", "\\text{Angela}"),
    ("1 \\pm \\sqrt{19}", "1+\\sqrt{19}"),
    ("0, 1, 2, 4", "0, 1, 2"),
    ("40_9", "40_8"),
    ("5", "\\frac{"),
    ("5", "}{"),
    ("5", ""),
    ("3", "3 \\text{ and } 4"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(make_prompt, gold, answer):
    assert last_box(make_prompt(gold), f"Therefore \\boxed{{{answer}}}.") == 1.0


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(make_prompt, gold, answer):
    assert last_box(make_prompt(gold), f"Therefore \\boxed{{{answer}}}.") == 0.0


def test_details_are_what_was_read(make_prompt):
    reward, details = judge(make_prompt("40"), r"So \boxed{30\text{ cm}}.")
    assert (reward, details) == (0.0, {"gold": "number: 40", "answer": 'number: 30"cm"'})
    assert judge(make_prompt("40"), "40").details == {"gold": "number: 40", "answer": "no box"}
    assert judge(make_prompt("1,2"), r"\boxed{3 4}").details["answer"] == "not read: 3 4"


def test_only_the_last_box_counts(make_prompt):
    assert last_box(make_prompt("5"), r"\boxed{5}, no: \boxed{6}") == 0.0
    assert last_box(make_prompt("5"), r"\boxed{6}, no: \boxed{5}") == 1.0
    assert last_box(make_prompt("5"), "The answer is 5.") == 0.0


@pytest.mark.parametrize("gold", ["", "???", "   "])
@pytest.mark.parametrize("response", [r"\boxed{5}", "no box", r"\boxed{???}"])
def test_unreadable_gold_is_an_error_for_every_response(make_prompt, gold, response):
    with pytest.raises(RewardError, match="prompt train/7"):
        last_box(make_prompt(gold), response)


def test_model_text_is_never_evaluated_as_python(make_prompt, tmp_path):
    victim = tmp_path / "victim"
    code = f"__import__('pathlib').Path('{victim}').touch()"
    assert last_box(make_prompt("5"), f"\\boxed{{{code}}}") == 0.0
    assert not victim.exists()


@pytest.mark.parametrize(
    ("gold", "response", "authors", "ours"),
    [
        ("5", r"so \boxed{5}.", 1, 1),
        ("5", "the answer is 5", 1, 0),
        ("5", "so $x = 5$", 1, 0),
        ("5", "The final answer is 5. I hope", 1, 0),
        (r"\frac{1}{2}", "0.5", 1, 0),
        ("5", r"\boxed{6}, so 5", 0, 0),
        ("5", r"\boxed{5}, then \boxed{6}", 0, 0),
        ("6", r"\boxed{5}, then \boxed{6}", 0, 1),
        ("5", r"\boxed{5} and 6", 1, 1),
        ("5", r"The final answer is $6$. \boxed{5}", 1, 1),
        ("5", "", 0, 0),
        ("5", "no number", 0, 0),
    ],
)
def test_label_rules_differ_where_the_authors_do(
    make_prompt, gold, response, authors, ours
) -> None:
    """The authors' column is what their own compute_score returned (ritzz-ai/PACS, bbe1dc6,
    math-verify 0.9.0).
    """
    assert authors_rule(make_prompt(gold), response) == authors
    assert last_box(make_prompt(gold), response) == ours
