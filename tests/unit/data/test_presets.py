import base64
import math
import os
import pickle
import zlib
from dataclasses import replace
from datetime import datetime

import pytest

from pacs_megatron.config.schema import ColumnOptions, DatasetOptions
from pacs_megatron.data.presets import PRESETS, columns_of, problem_of
from pacs_megatron.data.sources import DataRow, read_rows
from pacs_megatron.errors import DataError

SAMPLE_FILES = {
    "deepscaler": "deepscaler.json",
    "gsm8k": "gsm8k.jsonl",
    "math500": "math500.json",
    "aime": "aime.json",
    "amc23": "amc23.json",
    "beyondaime": "beyondaime.jsonl",
    **{name: f"{name}.jsonl" for name in ("gpqa", "apps", "livecodebench")},
}
ANSWERS = {
    "deepscaler": [
        "132",
        "x^2-3x-10",
        "60^\\circ",
        "(-\\infty,-3) \\cup (3,\\infty)",
        "\\frac{1}{2}",
    ],
    "gsm8k": ["18", "1500", "-4"],
    "math500": ["\\left( 1, -4 \\right)", "1 \\pm \\sqrt{5}", "111_4", "\\text{east}"],
    "aime": ["25", "900"],
    "amc23": ["142", "-4", "2.5"],
    "beyondaime": ["5040", "8192"],
    "gpqa": ["C", "A"],
    "apps": [
        '{"inputs": ["1 2\\n", "3 4\\n"], "outputs": ["3\\n", "7\\n"]}',
        '{"fn_name": "push", "inputs": [[[1, 2], 1]], "outputs": [[[1, 2, 1]]]}',
    ],
    "livecodebench": [
        '{"inputs": ["1 2", "5 4", "-1 -2"], "outputs": ["2", "5", "-1"], "fn_name": null}',
        '{"inputs": ["[1, 2]\\n1", "[]\\n0"], "outputs": ["[1, 2, 1]", "[0]"], "fn_name": "push"}',
    ],
}


def problems(samples, preset):
    options = DatasetOptions(path=str(samples / SAMPLE_FILES[preset]), preset=preset)
    return [problem_of(row, columns_of(options)) for row in read_rows(options).used]


def own(values, **columns):
    options = DatasetOptions(
        path="x.json", columns=ColumnOptions(**({"problem": "q", "answer": "a"} | columns))
    )
    return problem_of(DataRow(index=3, where="x.json:4", values=values), columns_of(options))


def test_every_preset_has_a_sample():
    assert PRESETS.keys() == SAMPLE_FILES.keys() == ANSWERS.keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_read_their_schema(samples, preset):
    found = problems(samples, preset)
    assert [problem.answer for problem in found] == ANSWERS[preset]
    assert all(problem.problem.strip() for problem in found)


def test_a_choice_is_at_its_letter_and_a_program_has_its_starter(samples):
    first, second = problems(samples, "gpqa")
    assert f"\n{first.answer}. Mercury\n" in first.problem
    assert f"\n{second.answer}. Nitrogen\n" in second.problem
    assert "reads standard input" in problems(samples, "livecodebench")[0].problem
    assert "```python\nclass Solution" in problems(samples, "livecodebench")[1].problem


def test_the_orders_of_choices_are_draws_of_their_own(samples):
    """Over many questions, each letter is right equally often in each order."""
    options = DatasetOptions(path=str(samples / SAMPLE_FILES["gpqa"]), preset="gpqa")
    [row, _] = read_rows(options).used
    letters = []
    for number in range(300):
        values = {**row.values, "Question": f"{row.values['Question']} {number}"}
        orders = []
        for order in range(4):
            problem = problem_of(
                replace(row, values=values, choice_order=order), columns_of(options)
            )
            assert f"\n{problem.answer}. Mercury\n" in problem.problem
            orders.append(problem.answer)
        letters.append(orders)
    for order in range(4):
        counts = [sum(found[order] == letter for found in letters) for letter in "ABCD"]
        assert min(counts) > 50
    pairs = {tuple(found[:2]) for found in letters}
    assert len(pairs) == 16  # independent of each other


@pytest.mark.parametrize(
    "private",
    [
        "x",
        "[",
        "[1]",
        "5",
        base64.b64encode(zlib.compress(pickle.dumps(os.getcwd))).decode(),
        base64.b64encode(
            zlib.compress(b"\x80\x04\x8c\x01ar\xff\xff\xff\x7f.")
        ).decode(),  # a memo of 32 GiB
        base64.b64encode(zlib.compress(b"\x80\x04r\xff.")).decode(),
        base64.b64encode(b"x").decode(),
    ],
)
def test_private_tests_of_another_form_are_rejected_and_no_code_of_them_runs(samples, private):
    row = read_rows(
        DatasetOptions(path=str(samples / "livecodebench.jsonl"), preset="livecodebench")
    ).used[0]
    row = DataRow(index=0, where="x.jsonl:1", values={**row.values, "private_test_cases": private})
    with pytest.raises(
        DataError, match=r"x.jsonl:1: the test cases are not in LiveCodeBench's schema"
    ):
        problem_of(row, PRESETS["livecodebench"])


def test_solutions(samples):
    first, second, *_ = problems(samples, "deepscaler")
    assert first.solution is None
    assert second.solution.endswith("\\boxed{x^2-3x-10}.")
    assert problems(samples, "gsm8k")[1].solution == (
        "They are 250*6=1,500 melons.\nThe answer is \\boxed{1500}."
    )
    assert problems(samples, "amc23")[0].solution is None


@pytest.mark.parametrize(
    ("value", "answer"), [(142.0, "142"), (-4, "-4"), (0.5, "0.5"), (" x+1 ", "x+1"), (0, "0")]
)
def test_answers_may_be_numbers(value, answer):
    assert own({"q": "?", "a": value}).answer == answer


def test_own_columns_with_solution():
    assert own({"q": "?", "a": 1, "s": "so"}, solution="s").solution == "so"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"q": "?"}, r"x\.json:4: no column 'a', it has 'q'; "),
        ({"a": "1"}, r"no column 'q', it has 'a'"),
        ({"q": "?", "a": None}, r"column 'a' is None \(NoneType\), expected text or a number"),
        ({"q": "?", "a": " "}, "column 'a' is empty"),
        ({"q": "?", "a": True}, "column 'a' is True"),
        ({"q": "?", "a": math.nan}, "column 'a' is nan"),
        ({"q": "?", "a": ["1"]}, r"\(list\)"),
        ({"q": "", "a": "1"}, "column 'q' is empty"),
        ({"q": 7, "a": "1"}, r"column 'q' is 7 \(int\)"),
        (
            {"q": "x" * 5_000_000, "a": "1"},
            "column 'q' is 'x.*expected the problem's text, at most 4194304 characters",
        ),
    ],
)
def test_bad_rows_name_row_and_column(values, message):
    with pytest.raises(DataError, match=message):
        own(values)


def test_gsm8k_row_without_answer():
    with pytest.raises(DataError, match="expected '#### <number>' last"):
        problem_of(
            DataRow(index=0, where="g:1", values={"question": "?", "answer": "18"}),
            PRESETS["gsm8k"],
        )


def test_names_with_dots_are_places_inside_columns():
    values = {
        "prompt": [{"role": "user", "content": "What is 1+2?"}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is 3"}],
        "a.b": "4",
        "a": {"b": "5"},
    }
    nested = {"problem": "prompt", "answer": "reward_model.ground_truth"}
    found = own(values, **nested, solution="messages.1.content")
    assert (found.problem, found.answer, found.solution) == ("What is 1+2?", "3", "It is 3")
    assert own(values, problem="messages.0.content", answer="a.b").answer == "4"

    names = "'reward_model', 'reward_model.style', 'reward_model.ground_truth'"
    with pytest.raises(DataError, match=f"no column 'reward_model.truth', it has .*{names}"):
        own(values, problem="prompt", answer="reward_model.truth")
    with pytest.raises(DataError, match=r"no column 'messages.2.content'"):
        own(values, problem="messages.2.content", answer="a.b")


USER = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("turns", "system"), [([USER], None), ([SYSTEM, USER], "s"), ([{**USER, "name": "x"}], None)]
)
def test_a_conversation_of_one_turn_is_a_problem(turns, system):
    found = own({"q": turns, "a": "1"})
    assert (found.problem, found.system) == ("q", system)


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [SYSTEM],
        [USER, SYSTEM],
        [USER, {"role": "assistant", "content": "a"}],
        [USER, USER],
        [{"role": "user", "content": [{"type": "text", "text": "q"}]}],
        [{"role": "user"}],
        [{"role": "user", "content": " "}],
        ["q"],
        [{"from": "human", "value": "q"}],
    ],
)
def test_another_conversation_is_an_error(turns):
    with pytest.raises(DataError, match=r"column 'q' is .*or a conversation \[\{role: user"):
        own({"q": turns, "a": "1"})


def further(values, *names, preset=None):
    columns = None if preset else ColumnOptions(problem="q", answer="a")
    options = DatasetOptions(path="x.json", columns=columns, preset=preset, extra_columns=names)
    return problem_of(DataRow(index=3, where="x.json:4", values=values), columns_of(options)).extra


def test_further_columns_keep_their_types():
    values = {"q": "q", "a": "1", "kind": "sum", "level": 3, "share": 0.5, "ok": True, "none": None}
    values |= {"tags": ["a", [1]], "info": {"split": "x", "n": 2}}
    names = ("kind", "level", "share", "ok", "none", "tags", "info", "info.n")
    assert further(values, *names) == {name: values.get(name, 2) for name in names}
    assert further(values) == {}
    assert further({"problem": "q", "answer": "1", "n": 1}, "n", preset="math500") == {"n": 1}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "is nan"),
        (b"x", "is b'x' \\(bytes\\)"),
        (datetime(2024, 1, 1), "expected text, a finite number"),
        ({1: 2}, "expected text"),
        ([{"a": math.inf}], "expected text"),
    ],
)
def test_a_further_column_that_json_cannot_contain_is_an_error(value, message):
    with pytest.raises(DataError, match=message):
        further({"q": "q", "a": "1", "kind": value}, "kind")


def test_a_further_column_that_is_missing_is_an_error():
    with pytest.raises(DataError, match=r"no column 'kin', it has 'q', 'a'; correct `extra_col"):
        further({"q": "q", "a": "1"}, "kin")
