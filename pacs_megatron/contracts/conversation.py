"""The turns of a response: texts of the policy and of the environment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pacs_megatron.contracts.samples import Sample, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A part of the conversation after the prompt."""

    role: str
    """`assistant`: the policy wrote the text; `environment`: a message, with its markers."""
    text: str
    calls: tuple[ToolCall, ...] = ()
    """of the policy's turn: calls of tools before the next turn; each with its `failure`, if any"""


def turn_from_json(value: Mapping[str, Any]) -> Turn:
    """Inverse of `dataclasses.asdict` of a turn, through JSON."""
    calls = tuple(ToolCall(**call) for call in value["calls"])
    return Turn(role=value["role"], text=value["text"], calls=calls)


def turns_of(sample: Sample, decode: Callable[[np.ndarray], str]) -> list[Turn]:
    """The conversation after the prompt: turns of the policy (role `assistant`), and what the
    environment wrote between them, markers included (role `environment`).

    Calls before the first turn count to it.
    """
    turns = []
    start = 0
    length = len(sample.response_ids)
    pieces = [*sample.environment, (length, length)]
    for number, (first, end) in enumerate(pieces, start=1):
        calls = tuple(call for call in sample.calls if max(call.turn, 1) == number)
        text = decode(sample.response_ids[start:first])
        turns.append(Turn(role="assistant", text=text, calls=calls))
        if end > first:
            turns.append(Turn(role="environment", text=decode(sample.response_ids[first:end])))
        start = end
    return turns


def policy_text(turns: Sequence[Turn]) -> str:
    """The response as a verifier reads it: the policy's turns, a line each, so that no tool can
    write an answer.
    """
    return "\n".join(turn.text for turn in turns if turn.role == "assistant")


def response_text(sample: Sample, decode: Callable[[np.ndarray], str]) -> str:
    """The text of a sample for its verifier and for files: its own, or that of its tokens."""
    if sample.text is not None:
        return sample.text
    if not sample.environment:
        return decode(sample.response_ids)
    return policy_text(turns_of(sample, decode))
