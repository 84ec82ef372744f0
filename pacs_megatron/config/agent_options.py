"""Options of agents: the user's function, its tools, and their limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pacs_megatron.config.text import Line, PathText, Word
from pacs_megatron.contracts.options import Options
from pacs_megatron.contracts.turns import TurnMarkers


class CalculatorTool(Options):
    """`call(name, expression=...)`: the exact value of an arithmetic expression."""

    kind: Literal["calculator"]
    """Kind of the tool."""


class PythonTool(Options):
    """`call(name, code=...)`: what a program prints."""

    kind: Literal["python"]
    """Kind of the tool."""

    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """Isolation of the program, as `reward.sandbox`. `none` isolates nothing."""

    memory_gib: float = Field(default=1.0, gt=0)
    """Memory of all processes of a program, in GiB."""


class RetrievalTool(Options):
    """`call(name, query=...)`: the passages of a text file that fit a query best (BM25)."""

    kind: Literal["retrieval"]
    """Kind of the tool."""

    path: PathText
    """Text file in UTF-8. An empty line separates passages."""

    top_k: PositiveInt = 3
    """Number of passages."""


class CustomTool(Options):
    """`call(name, ...)`: the text that your function returns for the same arguments."""

    kind: Literal["custom"]
    """Kind of the tool."""

    function: Line
    """`module:function` or `path/to/file.py:function`."""


ToolOptions = Annotated[
    CalculatorTool | PythonTool | RetrievalTool | CustomTool, Field(discriminator="kind")
]


class AgentOptions(Options):
    """Several turns of the policy, with tools, by a function of yours."""

    function: Line
    """`module:function` or `path/to/file.py:function` of `async def solve(problem, session)`."""

    roles: tuple[Word, ...] = Field(default=("tool",), strict=False, min_length=1)
    """Roles of the messages that it appends."""

    reads_answers: bool = False
    """Whether `problem` has the reference answer and the extra columns, for an agent that judges
    itself (`reward.name: agent`). The policy reads what the agent appends.
    """

    turn_markers: TurnMarkers | None = None
    """Texts around a message; null takes them from the chat template, if they are the same in
    every conversation.
    """

    tools: dict[Word, ToolOptions] = Field(default_factory=dict)
    """Tools by name."""

    workers: PositiveInt = 16
    """Number of open trajectories; each has a process."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that the function itself may take for a trajectory, without turns of the policy and
    tools.
    """

    memory_limit_gib: float = Field(default=1.0, gt=0)
    """Memory of a worker with its child processes, in GiB."""

    max_turns: PositiveInt = 16
    """Maximum number of turns of the policy. A longer trajectory is truncated."""

    max_calls: PositiveInt = 16
    """Maximum number of calls of tools in a trajectory. Further ones fail."""

    call_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds that a call of a tool may take."""

    call_chars: PositiveInt = 4000
    """Characters of a tool's result that `call` returns; the rest is cut, with a note."""

    tool_workers: PositiveInt = 4
    """Number of calls that run at the same time; each has a process."""

    on_tool_failure: Literal["text", "end"] = "text"
    """A call that fails, takes too long or crashes: `text` returns the reason as its text, `end`
    ends the trajectory without a verdict.
    """
