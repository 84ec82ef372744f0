"""Judges programs by the tests of the data set: standard input and output, or calls of a function.

The answer of a row is `{"inputs": [...], "outputs": [...], "fn_name": null or name}`, the form of
APPS' `input_output` and of LiveCodeBench's runner. The program is the last fenced block of the
response. The comparison runs outside of the sandbox, which never receives an expected output.
"""

import json
import re
import time
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from pacs_megatron.config.reward_options import CodeReward
from pacs_megatron.contracts import Judgement, Prompt
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards import sandbox

NO_PROGRAM = "no program"
_BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


class Tests(NamedTuple):
    """Inputs and expected outputs; with `function` lists of arguments and allowed results."""

    function: str | None
    inputs: list[Any]
    expected: list[Any]


class Code:
    """Reward 1.0 if the program passes every test, else 0.0 (also without a program).

    Details: the first failed test.
    """

    def __init__(self, options: CodeReward) -> None:
        """Raises ConfigError if the sandbox does not work here."""
        sandbox.check(options.sandbox)
        self._options = options

    def __call__(self, prompt: Prompt, response: str) -> Judgement:
        """Runs the program of a response until the first failed test.

        Args:
            prompt: its answer has the tests.
            response: the program is its last fenced block.

        Returns:
            1.0 or 0.0. Details: `passed` and `tests`, counts, and `reason` of a failure.

        Raises:
            RewardError: if the tests are malformed or the sandbox does not start.
        """
        tests = read_tests(prompt)
        num_tests = len(tests.inputs)
        program = last_block(response)
        if program is None:
            return Judgement(0.0, {"passed": 0, "tests": num_tests, "reason": NO_PROGRAM})

        options = self._options
        deadline = time.monotonic() + options.timeout_s
        results = sandbox.run_tests(
            sandbox.Program(program, tests.inputs, tests.function),
            sandbox.Limits(deadline, options.test_timeout_s, options.test_memory_gib),
            options.sandbox,
        )
        for number, (result, expected) in enumerate(zip(results, tests.expected, strict=True)):
            reason = _failure(result, expected, is_call=tests.function is not None)
            if reason is not None:
                results.close()  # type: ignore[attr-defined]  # ends the sandbox
                details = {"passed": number, "tests": num_tests, "reason": reason[:200]}
                return Judgement(0.0, details)
        return Judgement(1.0, {"passed": num_tests, "tests": num_tests})


def last_block(response: str) -> str | None:
    """The content of the last closed block of three backticks."""
    blocks: list[str] = _BLOCK.findall(response)
    return blocks[-1] if blocks else None


def read_tests(prompt: Prompt) -> Tests:
    """The tests in the answer of a row.

    Raises RewardError for an answer that is not in the schema.
    """
    try:
        answer = json.loads(prompt.answer)
        inputs = answer["inputs"]
        outputs = answer["outputs"]
        function = answer.get("fn_name")
        read = _text_pair if function is None else _call
        pairs = [read(test, output) for test, output in zip(inputs, outputs, strict=True)]
        if pairs and isinstance(inputs, list) and (function is None or function.isidentifier()):
            return Tests(
                function,
                [test for test, _ in pairs],
                [expected for _, expected in pairs],
            )
        reason = "no tests, or fn_name is no name"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise RewardError(
        f"reward.name=code: the tests (answer) of prompt {prompt.id} are malformed ({reason}); "
        "expected a JSON object with inputs, outputs and fn_name, as APPS' input_output; correct "
        "or remove the row"
    )


def _text_pair(test: Any, output: Any) -> tuple[str, str]:
    """Standard input and output. APPS writes some of them as lists of lines."""
    texts = ["\n".join(text) if isinstance(text, list) else text for text in (test, output)]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a test of standard input and output is not text")
    return texts[0], texts[1]


def _call(arguments: Any, output: Any) -> tuple[list[Any], list[Any]]:
    """Arguments and allowed results.

    LiveCodeBench has JSON text, an argument a line; APPS values, results in a list.
    """
    if isinstance(arguments, str):
        return [json.loads(line) for line in arguments.split("\n")], [json.loads(output)]
    if not isinstance(arguments, list):
        raise TypeError(f"arguments are {type(arguments).__name__}, expected a list")
    allowed = [output]
    if isinstance(output, list) and output:
        allowed.append(output[0])
    return arguments, allowed


def _failure(result: dict[str, Any], expected: Any, *, is_call: bool) -> str | None:
    """The reason why a test failed; None if the program passed it."""
    error = result.get("error")
    if error is not None:
        return str(error)
    if not _is_right(result.get("output"), expected, is_call):
        return "wrong output"
    return None


def _is_right(output: Any, expected: Any, is_call: bool) -> bool:
    """Whether the output is one of the allowed results of a call, or the expected text."""
    if not isinstance(output, str):
        return False
    if is_call:
        try:
            result = json.loads(output)
        except (ValueError, RecursionError):
            return False
        return any(result == allowed for allowed in expected)

    lines = output.strip().split("\n")
    expected_lines = expected.strip().split("\n")
    if len(lines) != len(expected_lines):
        return False
    return all(_same_line(left, right) for left, right in zip(lines, expected_lines, strict=True))


def _same_line(left: str, right: str) -> bool:
    """Equal text without outer space, or equal decimal numbers: the comparison of LiveCodeBench."""
    if left.strip() == right.strip():
        return True
    try:
        return [Decimal(word) for word in left.split()] == [Decimal(word) for word in right.split()]
    except InvalidOperation:
        return False


build = Code
