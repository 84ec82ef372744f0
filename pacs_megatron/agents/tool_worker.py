"""One process that runs tools, one call after another, for the tool pool.

`main()` gets the pool's process id and a socket's descriptor as arguments. Both directions use JSON
lines. The worker receives the setup and sends `{"ready": true}` or `{"error"}`. Then it receives
calls and sends `{"text"}` or `{"failure"}` for each. It ends when the socket closes.
"""

import inspect
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
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
from pacs_megatron.errors import ConfigError, PacsError, ToolError
from pacs_megatron.rewards import sandbox
from pacs_megatron.runtime.processes import die_with_parent, ignore_job_signals, limit_memory
from pacs_megatron.runtime.user_code import describe, import_function

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
_GRACE_S = 1.0
"""Part of a call's time that the sandbox itself may need"""


def main() -> None:
    """Serves calls until the pool closes the socket."""
    parent_pid, descriptor = map(int, sys.argv[1:])
    die_with_parent(parent_pid=parent_pid)
    ignore_job_signals()
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    lines = connection.makefile("r", encoding="utf-8")

    def send(message: Mapping[str, Any]) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        try:
            connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(1)  # the pool closed the socket

    setup = json.loads(lines.readline())
    sys.path[:] = setup["sys_path"]
    limit_memory(setup["memory_limit_bytes"])
    adapter: TypeAdapter[dict[str, ToolOptions]] = TypeAdapter(dict[str, ToolOptions])
    options = adapter.validate_json(setup["tools"])
    try:
        tools = build_tools(options, setup["seconds"])
    except ConfigError as error:
        send({"error": str(error)})
        return
    send({"ready": True})
    with suppress(ConnectionResetError):
        for line in lines:
            call = json.loads(line)
            send(run_call(tools[call["tool"]], call["arguments"], setup["chars"]))


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
        raise ToolError(str(result.get("error")))
    return str(result["output"])


def run_call(tool: Tool, arguments: Mapping[str, Any], chars: int) -> dict[str, str]:
    """The text of a call, cut after `chars` characters, or why it failed."""
    try:
        text = _result(tool, arguments)
    except PacsError as error:
        return {"failure": str(error)}
    except BaseException as error:  # noqa: BLE001  a plug-in may raise anything: only this call fails
        return {"failure": f"it raised {describe(error)}"}
    text = text.encode(errors="replace").decode()  # a lone surrogate has no tokens
    if len(text) > chars:
        text = f"{text[:chars]}\n[{len(text) - chars} more characters]"
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
