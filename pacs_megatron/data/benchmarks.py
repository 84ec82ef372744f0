"""Problems of benchmarks whose rows need more than a choice of columns: multiple choice and programs."""

import base64
import hashlib
import io
import json
import pickle
import zlib
from typing import Any

from pacs_megatron.data.sources import Row
from pacs_megatron.errors import DataError

_MAX_TEST_BYTES = 1 << 30
_STDIN = "Write a Python program that reads standard input and writes its answer to standard output."
_STARTER = "Write a Python program from this starter code:\n```python\n{}\n```"


def gpqa(row: Row) -> dict[str, str]:
    """Question with the four choices in an order that depends on the question only; the answer is a letter (Idavidrein/gpqa)."""
    question = _text(row, "Question")
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    choices = [_text(row, name) for name in names]
    order = sorted(range(4), key=lambda k: hashlib.sha256(f"{k} {question}".encode("utf-8", "replace")).digest())
    lines = [f"{letter}. {choices[k]}" for letter, k in zip("ABCD", order, strict=True)]
    text = "\n".join([question, "", *lines, "", "The final answer is the letter of the right choice."])
    return {"problem": text, "answer": "ABCD"[order.index(0)]}


def apps(row: Row) -> dict[str, str]:
    """Question and tests, as `reward.name: code` reads them (codeparrot/apps)."""
    starter = row.values.get("starter_code") or ""
    return {"problem": _task(_text(row, "question"), str(starter)), "answer": _text(row, "input_output")}


def livecodebench(row: Row) -> dict[str, str]:
    """Question and all tests, public and private, in the form of LiveCodeBench's own runner (code_generation_lite)."""
    try:
        public = json.loads(_text(row, "public_test_cases"))
        tests = public + _private_tests(_text(row, "private_test_cases"))
        answer = {
            "inputs": [test["input"] for test in tests],
            "outputs": [test["output"] for test in tests],
            "fn_name": json.loads(_text(row, "metadata")).get("func_name"),
        }
    except Exception as error:  # a damaged pickle can raise anything
        text = f"the test cases are not in LiveCodeBench's schema ({type(error).__name__}: {error})"
        raise DataError(f"{row.where}: {text}; correct or remove the row") from error
    starter = row.values.get("starter_code") or ""
    return {"problem": _task(_text(row, "question_content"), str(starter)), "answer": json.dumps(answer)}


BENCHMARKS = {"gpqa": gpqa, "apps": apps, "livecodebench": livecodebench}


class _TextOnly(pickle._Unpickler):
    """A pickle without any class: it can give text and containers only. The C one allocates gigabytes for a memo index."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"refers to {module}.{name}")


def _private_tests(text: str) -> Any:
    """JSON, or the base64 of the compressed pickle of JSON."""
    if text.lstrip().startswith("["):
        return json.loads(text)
    unpacked = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MAX_TEST_BYTES)
    return json.loads(_TextOnly(io.BytesIO(unpacked)).load())


def _task(question: str, starter: str) -> str:
    return f"{question}\n\n{_STARTER.format(starter) if starter.strip() else _STDIN}"


def _text(row: Row, name: str) -> str:
    value = row.values.get(name)
    if not isinstance(value, str) or not value.strip():
        raise row.wrong(name, "text")
    return value.strip()
