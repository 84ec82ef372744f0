"""The problem and the session of a trajectory, for the code of an agent. Runs in its worker.

async def solve(problem, session):
    answer = await session.generate(stop=["</call>"])
    session.append(await session.call("calculator", expression="6 * 7"))
    await session.generate()
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pacs_megatron.errors import AgentError, ToolError

Exchange = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Sends an operation to the driver and returns its reply."""


class TrajectoryEnded(BaseException):
    """Raised by the session after the driver has ended the trajectory, e.g. at its token limit.

    Not an Exception, so that `except Exception` does not keep the agent running.
    """


@dataclass(frozen=True, slots=True)
class Problem:
    """A row of the data."""

    id: str
    problem: str
    """text of the row"""
    prompt: str
    """output of the chat template: where the conversation begins"""
    source: str
    """name of the data set"""
    answer: str | None = None
    """the reference answer; None without `rollout.agent.reads_answers`"""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """`extra_columns` of the row, JSON values; empty without `rollout.agent.reads_answers`"""


class Answer(NamedTuple):
    """A turn of the policy."""

    text: str
    stop: str
    """`eos`: it ended with an end token or a stop string; `length`: with `max_tokens`"""
    tokens: int


class Session:
    """The conversation of one trajectory. One operation at a time."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._messages: list[dict[str, str]] = []
        self._is_closed = False

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Answer:
        """Lets the policy continue the conversation, from its exact tokens.

        Args:
            max_tokens: of this turn; None: what is left of `max_response_tokens`.
            stop: strings that end the turn, in addition to the end tokens; the text includes them.

        Raises:
            AgentError: wrong arguments, or the conversation cannot be continued.
        """
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise AgentError(f"max_tokens={max_tokens!r}, expected a positive integer or None")
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise AgentError(f"stop={stop!r}, expected a list of texts, none of them empty")
        messages = self._messages
        self._messages = []
        operation = {
            "op": "generate",
            "messages": messages,
            "max_tokens": max_tokens,
            "stop": list(stop),
        }
        reply = self._send(operation)
        return Answer(reply["text"], reply["stop"], reply["tokens"])

    def append(self, text: str, role: str = "tool") -> None:
        """Adds a message, whose tokens the policy reads before its next turn.

        Raises:
            AgentError: the text is no text.
        """
        if not isinstance(text, str) or not isinstance(role, str):
            raise AgentError(
                f"append({type(text).__name__}, role={type(role).__name__}), expected two texts"
            )
        self._messages.append({"role": role, "text": text})

    async def call(self, tool: str, **arguments: Any) -> str:
        """The text of a tool.

        If it fails, the text is the reason, or the trajectory ends (`on_tool_failure`).

        Args:
            tool: name in `rollout.agent.tools`.
            arguments: JSON values.

        Raises:
            AgentError: no such tool, or an argument that is no JSON value.
        """
        try:
            json.dumps(arguments, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise AgentError(
                f"call({tool!r}): the arguments are no JSON values: {error}"
            ) from error
        reply = self._send({"op": "call", "tool": tool, "arguments": arguments})
        text: str = reply["text"]
        return text

    def close(self) -> None:
        """Ends the session: a thread that `solve` left cannot use it later."""
        self._is_closed = True

    def _send(self, operation: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._is_closed:
            raise AgentError("the session is closed: solve has returned")
        reply = self._exchange(operation)
        if "ended" in reply:
            raise TrajectoryEnded(reply["ended"])
        if "error" in reply:
            raise AgentError(reply["error"])
        return reply


__all__ = ["AgentError", "Answer", "Problem", "Session", "ToolError", "TrajectoryEnded"]
