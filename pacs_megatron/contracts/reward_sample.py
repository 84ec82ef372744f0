"""The argument of a user's reward function: one response with its problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pacs_megatron.contracts.conversation import Turn
from pacs_megatron.contracts.samples import Prompt


class MissingColumnError(KeyError):
    """`sample.extra` has no such column."""


class ExtraColumns(dict[str, Any]):
    """Column of the data set -> JSON value. A missing one raises MissingColumnError."""

    def __missing__(self, column: str) -> Any:
        raise MissingColumnError(column)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSample:
    """A response to judge."""

    problem: str
    """Text of the problem, without the chat template"""
    prompt: str
    """Output of the chat template: the input of the model. The response continues it."""
    answer: str
    """The reference answer of the data set"""
    response: str
    """Text of the response, without the tokens that end it"""
    extra: Mapping[str, Any]
    """The columns of `extra_columns`: column -> its JSON value"""
    turns: tuple[Turn, ...]
    """The conversation after the prompt: one turn, the response, or all turns of an agent with
    their calls of tools
    """
    prompt_id: str
    """`<data set name>/<row>`"""
    source: str
    """Name of the data set"""


def reward_sample(prompt: Prompt, response: str, turns: Sequence[Turn] = ()) -> RewardSample:
    """The argument of a reward function for `response`.

    Args:
        prompt: of the response.
        response: text; of an agent, the turns of the policy, a line each.
        turns: of an agent; empty: the response is one turn.
    """
    return RewardSample(
        problem=prompt.problem,
        prompt=prompt.text,
        answer=prompt.answer,
        response=response,
        extra=ExtraColumns(prompt.extra),
        turns=tuple(turns) or (Turn(role="assistant", text=response),),
        prompt_id=prompt.id,
        source=prompt.source,
    )
