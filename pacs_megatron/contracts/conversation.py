"""The turns of a response: texts of the policy and of the environment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pacs_megatron.contracts.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A part of the conversation after the prompt."""

    role: str
    """`assistant`: the policy wrote the text; `environment`: a message, with its markers."""
    text: str


def turns_of(sample: Sample, decode: Callable[[np.ndarray], str]) -> list[Turn]:
    """The conversation after the prompt: turns of the policy (role `assistant`), and what the
    environment wrote between them, markers included (role `environment`).
    """
    turns = []
    start = 0
    length = len(sample.response_ids)
    for first, end in [*sample.environment, (length, length)]:
        turns.append(Turn(role="assistant", text=decode(sample.response_ids[start:first])))
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
