"""Column names and answer formats of the well-known data sets."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from pacs_megatron.config.schema import DatasetOptions
from pacs_megatron.data.benchmarks import BENCHMARKS
from pacs_megatron.data.sources import Row
from pacs_megatron.errors import DataError

_GSM8K_ANSWER = re.compile(r"####\s*(.+?)\s*$")
_GSM8K_CALCULATION = re.compile(r"<<[^<>]*>>")
_MAX_PROBLEM_CHARS = 4 << 20
"""A tokenizer takes up to 30 bytes of memory a character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The fields of a row that training and evaluation use."""

    problem: str
    answer: str
    solution: str | None


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of each column, in order of preference, and functions that read answer and solution from their text.

    `extract` and `demonstrate` return None if the text contains none.
    """

    problem: tuple[str, ...]
    answer: tuple[str, ...]
    solution: tuple[str, ...] = ()
    extract: Callable[[str], str | None] = str
    demonstrate: Callable[[str], str | None] = str
    read: Callable[[Row], dict[str, str]] | None = None
    """Makes the named columns from a row that has others."""


def _gsm8k_answer(text: str) -> str | None:
    match = _GSM8K_ANSWER.search(text)
    return match[1].replace(",", "") if match else None


def _gsm8k_solution(text: str) -> str | None:
    r"""The worked solution without calculator marks; `#### 5` becomes a sentence with `\boxed{5}`."""
    answer = _gsm8k_answer(text)
    steps = _GSM8K_CALCULATION.sub("", text[: text.rfind("####")]).strip()
    return f"{steps}\nThe answer is \\boxed{{{answer}}}." if answer else None


def _aime_answer(text: str) -> str:
    """AIME writes its integers with three digits: 025 is 25."""
    return str(int(text)) if re.fullmatch(r"[0-9]{1,3}", text) else text


# Copies on the hub spell the columns differently; the first name is the original's.
_PROBLEM = ("problem", "question", "Problem", "Question")
_ANSWER = ("answer", "Answer")
_SOLUTION = ("solution", "Solution")
PRESETS: dict[str, Columns] = {
    "deepscaler": Columns(_PROBLEM, _ANSWER, _SOLUTION),
    "gsm8k": Columns(("question",), ("answer",), ("answer",), extract=_gsm8k_answer, demonstrate=_gsm8k_solution),
    "math500": Columns(_PROBLEM, _ANSWER, _SOLUTION),
    "aime": Columns(_PROBLEM, _ANSWER, _SOLUTION, extract=_aime_answer),
    "amc23": Columns(_PROBLEM, _ANSWER),
    "beyondaime": Columns(_PROBLEM, _ANSWER),
    **{name: Columns(("problem",), ("answer",), read=read) for name, read in BENCHMARKS.items()},
}


def columns_of(options: DatasetOptions) -> Columns:
    """The columns of the preset or of the configuration, which has exactly one of them."""
    if options.preset is not None:
        return PRESETS[options.preset]
    named = options.columns
    assert named is not None
    return Columns((named.problem,), (named.answer,), () if named.solution is None else (named.solution,))


def problem_of(row: Row, columns: Columns) -> Problem:
    """The row's fields. Raises DataError with row and column if a field is missing, empty or of the wrong type."""
    if columns.read is not None:
        row = replace(row, values=columns.read(row))
    problem = _column(row, columns.problem)
    text = row.values[problem]
    if not isinstance(text, str) or not text.strip() or len(text) > _MAX_PROBLEM_CHARS:
        raise row.wrong(problem, f"the problem's text, at most {_MAX_PROBLEM_CHARS} characters")
    name = _column(row, columns.answer)
    answer = columns.extract(_answer_text(row, name))
    if answer is None:
        raise row.wrong(name, "'#### <number>' last")
    return Problem(problem=text, answer=answer, solution=_solution(row, columns))


def _column(row: Row, names: tuple[str, ...]) -> str:
    for name in names:
        if name in row.values:
            return name
    wanted, found = " or ".join(map(repr, names)), ", ".join(map(repr, row.values)) or "none"
    raise DataError(f"{row.where}: no column {wanted}, it has {found}; choose another preset or name the columns")


def _answer_text(row: Row, name: str) -> str:
    """Answers are text or numbers; 142.0 is 142."""
    value = row.values[name]
    match value:
        case str() if value.strip():
            return value.strip()
        case int() if not isinstance(value, bool):
            return str(value)
        case float() if math.isfinite(value):
            return str(int(value)) if value.is_integer() else repr(value)
    raise row.wrong(name, "text or a number")


def _solution(row: Row, columns: Columns) -> str | None:
    """None if the data set has no solutions, or an empty one, as in many rows of DeepScaleR."""
    for name in columns.solution:
        value = row.values.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise row.wrong(name, "text")
        return columns.demonstrate(value) if value.strip() else None
    return None
