"""Columns, answer formats and tests of the well-known data sets."""

import base64
import hashlib
import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pacs_megatron.config.schema import DatasetOptions
from pacs_megatron.data.sources import DataRow
from pacs_megatron.errors import DataError

_GSM8K_ANSWER = re.compile(r"####\s*(.+?)\s*$")
_GSM8K_CALCULATION = re.compile(r"<<[^<>]*>>")
_MAX_TEST_BYTES = 1 << 30
_STDIN = (
    "Write a Python program that reads standard input and writes its answer to standard output."
)
_STARTER = "Write a Python program from this starter code:\n```python\n{}\n```"

_MAX_PROBLEM_CHARS = 4 << 20
"""Maximum length of a problem; a tokenizer needs up to 30 bytes of memory per character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The fields of a row that training and evaluation use."""

    problem: str
    """Text of the problem"""
    answer: str
    """The reference answer, in the form that the reward function reads"""
    solution: str | None
    """A demonstration, for `sft`"""
    system: str | None = None
    """The system message of the row, if its problem is a conversation"""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns for the reward function: column -> JSON value"""


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the columns of a data set, and how to read them."""

    problem: tuple[str, ...]
    """Column of the problem; a row may have any of these names, the first one wins"""
    answer: tuple[str, ...]
    """Column of the answer"""
    solution: tuple[str, ...] = ()
    """Column of the solution; empty if the data set has none"""
    extract: Callable[[str], str | None] = str
    """The answer of the answer column's text; None if it has none"""
    demonstrate: Callable[[str], str | None] = str
    """The solution of the solution column's text; None if it has none"""
    read: Callable[[DataRow], dict[str, str]] | None = None
    """Makes the named columns from a row that has others."""
    extra: tuple[str, ...] = ()
    """Further columns for the reward function"""


def _gsm8k_answer(text: str) -> str | None:
    """The number behind `####`, without commas between thousands; None without it."""
    match = _GSM8K_ANSWER.search(text)
    return match[1].replace(",", "") if match else None


def _gsm8k_solution(text: str) -> str | None:
    r"""The worked solution without calculator marks; `#### 5` becomes a sentence with `\boxed{5}`.

    None if there is no answer.
    """
    answer = _gsm8k_answer(text)
    if not answer:
        return None
    steps = _GSM8K_CALCULATION.sub("", text[: text.rfind("####")]).strip()
    return f"{steps}\nThe answer is \\boxed{{{answer}}}."


def _aime_answer(text: str) -> str:
    """AIME writes its integers with three digits: 025 is 25."""
    return str(int(text)) if re.fullmatch(r"[0-9]{1,3}", text) else text


def _gpqa(row: DataRow) -> dict[str, str]:
    """Question with the four choices in an order that depends on the question and on
    `row.choice_order` only; the answer is a letter (Idavidrein/gpqa).
    """
    question = _text(row, "Question")
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    choices = [_text(row, name) for name in names]

    # An order with a number has a draw of its own.
    prefix = f"{row.choice_order}:" if row.choice_order else ""

    def digest(index: int) -> bytes:
        text = f"{prefix}{index} {question}"
        return hashlib.sha256(text.encode("utf-8", "replace")).digest()

    order = sorted(range(4), key=digest)
    lines = [f"{letter}. {choices[index]}" for letter, index in zip("ABCD", order, strict=True)]
    text = "\n".join(
        [question, "", *lines, "", "The final answer is the letter of the right choice."]
    )
    return {"problem": text, "answer": "ABCD"[order.index(0)]}


def _apps(row: DataRow) -> dict[str, str]:
    """Question and tests, as `reward.name: code` reads them (codeparrot/apps)."""
    return {
        "problem": _task(_text(row, "question"), row),
        "answer": _text(row, "input_output"),
    }


def _livecodebench(row: DataRow) -> dict[str, str]:
    """Question and all tests, public and private, in the form of LiveCodeBench's own runner
    (code_generation_lite).
    """
    try:
        public_tests = json.loads(_text(row, "public_test_cases"))
        tests = public_tests + _private_tests(_text(row, "private_test_cases"))
        answer = {
            "inputs": [test["input"] for test in tests],
            "outputs": [test["output"] for test in tests],
            "fn_name": json.loads(_text(row, "metadata")).get("func_name"),
        }
    except Exception as error:  # a damaged pickle can raise anything
        text = f"the test cases are not in LiveCodeBench's schema ({type(error).__name__}: {error})"
        raise DataError(f"{row.where}: {text}; correct or remove the row") from error
    return {
        "problem": _task(_text(row, "question_content"), row),
        "answer": json.dumps(answer),
    }


class _TextOnly(pickle._Unpickler):
    """Reads a pickle without any class, which can contain text and containers only.

    It is the one in Python: the one in C allocates gigabytes for a memo index.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"refers to {module}.{name}")


def _private_tests(text: str) -> Any:
    """The tests of a text in JSON, or in the base64 of the compressed pickle of JSON.

    Unpacks at most _MAX_TEST_BYTES; a longer text is cut and then malformed.
    """
    if text.lstrip().startswith("["):
        return json.loads(text)
    compressed = base64.b64decode(text, validate=True)
    unpacked = zlib.decompressobj().decompress(compressed, _MAX_TEST_BYTES)
    return json.loads(_TextOnly(io.BytesIO(unpacked)).load())


def _task(question: str, row: DataRow) -> str:
    """The question, and how the program gets its input."""
    starter = str(row.values.get("starter_code") or "")
    instruction = _STARTER.format(starter) if starter.strip() else _STDIN
    return f"{question}\n\n{instruction}"


def _text(row: DataRow, name: str) -> str:
    """The text of a column, without white space around it.

    Raises DataError if it is missing or empty.
    """
    value = row.values.get(name)
    if not isinstance(value, str) or not value.strip():
        raise row.wrong(name, "text")
    return value.strip()


# Copies on the hub spell the columns differently; the first name is the original's.
_PROBLEM = ("problem", "question", "Problem", "Question")
_ANSWER = ("answer", "Answer")
_SOLUTION = ("solution", "Solution")
PRESETS: dict[str, Columns] = {
    "deepscaler": Columns(_PROBLEM, _ANSWER, _SOLUTION),
    "gsm8k": Columns(
        ("question",), ("answer",), ("answer",), extract=_gsm8k_answer, demonstrate=_gsm8k_solution
    ),
    "math500": Columns(_PROBLEM, _ANSWER, _SOLUTION),
    "aime": Columns(_PROBLEM, _ANSWER, _SOLUTION, extract=_aime_answer),
    "amc23": Columns(_PROBLEM, _ANSWER),
    "beyondaime": Columns(_PROBLEM, _ANSWER),
    "gpqa": Columns(("problem",), ("answer",), read=_gpqa),
    "apps": Columns(("problem",), ("answer",), read=_apps),
    "livecodebench": Columns(("problem",), ("answer",), read=_livecodebench),
}


def columns_of(options: DatasetOptions) -> Columns:
    """The columns of the preset or of the configuration, which has exactly one of them."""
    if options.preset is not None:
        return replace(PRESETS[options.preset], extra=options.extra_columns)
    names = options.columns
    assert names is not None
    solution = () if names.solution is None else (names.solution,)
    return Columns((names.problem,), (names.answer,), solution, extra=options.extra_columns)


def problem_of(row: DataRow, columns: Columns) -> Problem:
    """The row's fields.

    Args:
        row: A row of the data set.
        columns: From `columns_of`.

    Raises:
        DataError: A field is missing, empty or of the wrong type, with row and column.
    """
    extra = {name: _json_value(row, name) for name in columns.extra}
    if columns.read is not None:
        row = replace(row, values=columns.read(row))

    problem_column = _column(row, columns.problem)
    system, problem = _turns(row, problem_column)
    if not isinstance(problem, str) or not problem.strip() or len(problem) > _MAX_PROBLEM_CHARS:
        raise row.wrong(
            problem_column,
            f"the problem's text, at most {_MAX_PROBLEM_CHARS} characters, or a conversation "
            "[{role: user, content: the problem}] with a system message before it or none",
        )

    answer_column = _column(row, columns.answer)
    answer = columns.extract(_answer_text(row, answer_column))
    if answer is None:
        raise row.wrong(answer_column, "'#### <number>' last")
    return Problem(
        problem=problem,
        answer=answer,
        solution=_solution(row, columns),
        system=system,
        extra=extra,
    )


def _turns(row: DataRow, column: str) -> tuple[str | None, Any]:
    """The system message and the problem: a text, or a conversation of one user's turn.

    The problem is None if the conversation is another one.
    """
    value = row.get(column)
    if not isinstance(value, list):
        return None, value

    messages = []
    for message in value:
        if not isinstance(message, Mapping):
            return None, None
        messages.append((message.get("role"), message.get("content")))
    match messages:
        case [("user", problem)]:
            return None, problem
        case [("system", str(system)), ("user", problem)] if len(system) <= _MAX_PROBLEM_CHARS:
            return system, problem
    return None, None


def _json_value(row: DataRow, column: str) -> Any:
    """The value of a further column. Raises DataError if JSON cannot contain it."""
    if not row.has(column):
        raise DataError(f"{row.missing([column])}; correct `extra_columns`")
    value = row.get(column)
    if not _is_json(value):
        raise row.wrong(column, "text, a finite number, true, false, null, or lists and maps of it")
    return value


def _is_json(value: Any) -> bool:
    match value:
        case None | str() | bool() | int():
            return True
        case float():
            return math.isfinite(value)
        case list():
            return all(map(_is_json, value))
        case dict():
            return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    return False


def _column(row: DataRow, names: tuple[str, ...]) -> str:
    """The first of `names` that is a column of the row. Raises DataError if none is."""
    for name in names:
        if row.has(name):
            return name
    raise DataError(f"{row.missing(names)}; correct `columns` or `preset`")


def _answer_text(row: DataRow, name: str) -> str:
    """Answers are text or numbers; 142.0 is 142."""
    value = row.get(name)
    match value:
        case str() if value.strip():
            return value.strip()
        case int() if not isinstance(value, bool):
            return str(value)
        case float() if math.isfinite(value):
            return str(int(value)) if value.is_integer() else repr(value)
    first = f" (an item of a list is {name + '.0'!r})" if isinstance(value, list) else ""
    raise row.wrong(name, f"text or a number{first}")


def _solution(row: DataRow, columns: Columns) -> str | None:
    """The demonstration of a row.

    None if the data set has no solutions, or the row an empty one, as many rows of DeepScaleR.
    """
    for name in columns.solution:
        value = row.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise row.wrong(name, "text")
        return columns.demonstrate(value) if value.strip() else None
    return None
