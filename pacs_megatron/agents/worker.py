"""One process that runs agents, one trajectory after another, for the agent pool.

Both directions use JSON lines, no pickle (`runtime/worker_process.py`). The setup has the
`function`. Then the worker receives a problem, sends operations (`generate`, `call`), receives a
reply to each, and sends `{"op": "done", "reward"}` or `{"op": "failed", "reason"}`.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from pacs_megatron.agents.session import Problem, Session, TrajectoryEnded
from pacs_megatron.errors import ConfigError, RewardError
from pacs_megatron.runtime.user_code import describe, import_function
from pacs_megatron.runtime.worker_process import Connection, Handler, serve

KEY = "rollout.agent.function"


def main() -> None:
    """Serves problems until the pool closes the socket."""
    serve(_solve)


def _solve(setup: Mapping[str, Any]) -> Handler:
    """Raises ConfigError if the user's function cannot be called."""
    solve = load_agent(setup["function"])

    def last_operation(line: str, connection: Connection) -> dict[str, Any]:
        def exchange(operation: Mapping[str, Any]) -> Mapping[str, Any]:
            connection.send(operation)
            reply: dict[str, Any] = json.loads(connection.receive())
            return reply

        return run(solve, Problem(**json.loads(line)["problem"]), exchange)

    return last_operation


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
    """The last operation of a trajectory: `done` with the reward that `solve` returned, if any, or
    `failed` with the reason.
    """
    session = Session(exchange)
    try:
        result = asyncio.run(solve(problem, session))
    except TrajectoryEnded:
        return {"op": "done", "reward": None}
    except BaseException as error:  # noqa: BLE001  a plug-in may raise anything: only this trajectory fails
        return {"op": "failed", "reason": f"it raised {describe(error)}"}
    finally:
        session.close()
    if result is None:
        return {"op": "done", "reward": None}
    # Imported here: most agents return nothing, and NumPy takes memory of each worker.
    from pacs_megatron.rewards.labels import as_reward

    try:
        return {"op": "done", "reward": as_reward(result)}
    except RewardError as error:
        return {"op": "failed", "reason": f"its own reward: {error}"}
