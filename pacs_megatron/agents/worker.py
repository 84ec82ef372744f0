"""One process that runs agents, one trajectory after another, for the agent pool.

`main()` gets the pool's process id and a socket's descriptor as arguments. Both directions use JSON
lines, no pickle. The worker receives the setup and sends `{"ready": true}` or `{"error"}`. Then it
receives a problem, sends operations (`generate`, `call`) and receives a reply to each, and sends
`{"op": "done"}` or `{"op": "failed", "reason"}`. It ends when the socket closes.
"""

import asyncio
import inspect
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from pacs_megatron.agents.session import Problem, Session, TrajectoryEnded
from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.processes import die_with_parent, ignore_job_signals, limit_memory
from pacs_megatron.runtime.user_code import describe, import_function

KEY = "rollout.agent.function"


def main() -> None:
    """Serves problems until the pool closes the socket."""
    parent_pid, descriptor = map(int, sys.argv[1:])
    die_with_parent(parent_pid=parent_pid)
    ignore_job_signals()
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    lines = connection.makefile("r", encoding="utf-8")
    replies = connection.makefile("w", encoding="utf-8")

    setup = json.loads(lines.readline())
    sys.path[:] = setup["sys_path"]
    limit_memory(setup["memory_limit_bytes"])
    try:
        solve = load_agent(setup["function"])
    except ConfigError as error:
        _send(replies, {"error": str(error)})
        return
    _send(replies, {"ready": True})

    def exchange(operation: Mapping[str, Any]) -> Mapping[str, Any]:
        _send(replies, operation)
        line = lines.readline()
        if not line:
            os._exit(1)  # the pool closed the socket
        reply: dict[str, Any] = json.loads(line)
        return reply

    with suppress(ConnectionResetError):
        for line in lines:
            _send(replies, run(solve, Problem(**json.loads(line)["problem"]), exchange))


def load_agent(name: str) -> Callable[[Problem, Session], Any]:
    """The user's `solve`. Raises ConfigError unless it is async and takes its two arguments."""
    solve = import_function(name, KEY)
    if not inspect.iscoroutinefunction(solve):
        raise ConfigError(
            f"{KEY}={name!r} is no async function; define `async def solve(problem, session)`"
        )
    try:
        inspect.signature(solve).bind("problem", "session")
    except TypeError as error:
        raise ConfigError(
            f"{KEY}={name!r} cannot be called as solve(problem, session): {error}; it takes these "
            "two arguments"
        ) from error
    return solve


def run(
    solve: Callable[[Problem, Session], Any],
    problem: Problem,
    exchange: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, Any]:
    """The last operation of a trajectory: `done`, or `failed` with the reason."""
    session = Session(exchange)
    try:
        result = asyncio.run(solve(problem, session))
    except TrajectoryEnded:
        return {"op": "done"}
    except BaseException as error:  # noqa: BLE001  a plug-in may raise anything: only this trajectory fails
        return {"op": "failed", "reason": f"it raised {describe(error)}"}
    finally:
        session.close()
    if result is not None:
        kind = type(result).__name__
        return {"op": "failed", "reason": f"it returned {kind}, expected None: the reward judges"}
    return {"op": "done"}


def _send(replies: TextIO, message: Mapping[str, Any]) -> None:
    # The agent may have closed or replaced it.
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    try:
        replies.write(json.dumps(message) + "\n")
        replies.flush()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the pool closed the socket
