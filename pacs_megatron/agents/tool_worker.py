"""One process that runs tools, one call after another, for the tool pool.

Both directions use JSON lines (`runtime/worker_process.py`). The setup has the `tools` and their
limits. Then the worker receives calls and sends `{"text"}` or `{"failure"}` for each.
"""

import inspect
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pacs_megatron.agents.calculator import calculate
from pacs_megatron.agents.retrieval import Retrieval
from pacs_megatron.config.agent_options import (
    CalculatorTool,
    CustomTool,
    PythonTool,
    RetrievalTool,
    ToolOptions,
)
from pacs_megatron.config.text import local_path
from pacs_megatron.errors import PacsError, ToolError
from pacs_megatron.rewards import sandbox
from pacs_megatron.runtime.user_code import describe, import_function
from pacs_megatron.runtime.worker_process import Connection, Handler, serve

Tool = Callable[..., Any]
_WITH_ERROR = """
import sys, traceback
try:
    exec(compile(_CODE, "program.py", "exec"), {"__name__": "__main__"})
except SystemExit:
    pass
except BaseException as error:
    print(traceback.format_exception_only(error)[-1], end="")
"""
"""Runs `_CODE` in the sandbox and prints its error, so that the policy can read it"""
_TIME_LIMIT = "time limit"
"""Reason of the sandbox"""
_GRACE_S = 1.0
"""Part of a call's time that the sandbox itself may need"""


class _TimeLimitError(ToolError):
    """The sandbox ended a program at its limit of time."""


def main() -> None:
    """Serves calls until the pool closes the socket."""
    serve(_call)


def _call(setup: Mapping[str, Any]) -> Handler:
    """Raises ConfigError if a tool cannot be built."""
    adapter: TypeAdapter[dict[str, ToolOptions]] = TypeAdapter(dict[str, ToolOptions])
    tools = build_tools(adapter.validate_json(setup["tools"]), setup["seconds"])

    def result(line: str, _: Connection) -> dict[str, str]:
        call = json.loads(line)
        return run_call(tools[call["tool"]], call["arguments"], setup["chars"])

    return result


def build_tools(options: Mapping[str, ToolOptions], seconds: float) -> dict[str, Tool]:
    """Name -> function of the call's arguments. Raises ConfigError.

    Args:
        options: by name.
        seconds: limit of a call.
    """
    return {name: _build(name, one, seconds) for name, one in options.items()}


def _build(name: str, options: ToolOptions, seconds: float) -> Tool:
    match options:
        case CalculatorTool():
            return calculate
        case PythonTool():
            sandbox.check(options.sandbox)
            return partial(_run_python, options, seconds)
        case RetrievalTool():
            return Retrieval(Path(local_path(options.path)), options.top_k).search
        case CustomTool():
            return import_function(options.function, f"rollout.agent.tools.{name}.function")


def _run_python(options: PythonTool, seconds: float, code: str) -> str:
    """The output of a program, with the last line of its error.

    Raises ToolError for a limit, or an error of the sandbox.
    """
    if not isinstance(code, str):
        raise ToolError(f"code is {type(code).__name__}, expected text")
    limit_s = max(seconds - _GRACE_S, seconds / 2)
    limits = sandbox.Limits(time.monotonic() + limit_s, limit_s, options.memory_gib)
    program = sandbox.Program(f"_CODE = {code!r}\n{_WITH_ERROR}", [""], None)
    [result] = sandbox.run_tests(program, limits, options.sandbox)
    if "output" not in result:
        kind = _TimeLimitError if result.get("error") == _TIME_LIMIT else ToolError
        raise kind(str(result.get("error")))
    return str(result["output"])


def run_call(tool: Tool, arguments: Mapping[str, Any], chars: int) -> dict[str, Any]:
    """The text of a call, cut after `chars` characters, or why it failed."""
    try:
        text = _result(tool, arguments)
    except PacsError as error:
        return {"failure": str(error), "timed_out": isinstance(error, _TimeLimitError)}
    except BaseException as error:  # noqa: BLE001  a plug-in may raise anything: only this call fails
        return {"failure": f"it raised {describe(error)}"}
    text = text.encode(errors="replace").decode()  # a lone surrogate has no tokens
    if len(text) > chars:
        text = f"{text[:chars]}\n[{len(text) - chars} more characters]"
        return {"text": text, "cut": True}
    return {"text": text}


def _result(tool: Tool, arguments: Mapping[str, Any]) -> str:
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        raise ToolError(f"wrong arguments: {error}") from error
    text = tool(**arguments)
    if inspect.iscoroutine(text):
        text.close()
        raise ToolError("it is an async function; a tool is a plain one")
    if not isinstance(text, str):
        raise ToolError(f"it returned {type(text).__name__}, expected text")
    return text
