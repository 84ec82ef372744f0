"""The game of examples/tools, with a policy from a script."""

import asyncio
from types import SimpleNamespace

import pytest

from examples.tools.game import digit_of, reward, solve
from pacs_megatron.agents.session import Answer
from pacs_megatron.contracts import Turn

PROMPT_ID = "train/3"
DIGIT = digit_of(PROMPT_ID)


class Scripted:
    def __init__(self, guesses):
        self._guesses = iter(guesses)
        self.turns = []

    async def generate(self, *, max_tokens):
        text = next(self._guesses)
        self.turns.append(Turn(role="assistant", text=text))
        return Answer(text, "eos", len(text))

    def append(self, text):
        self.turns.append(Turn(role="environment", text=text))


@pytest.mark.parametrize(
    ("guesses", "messages", "expected"),
    [
        ([f" {DIGIT}\n"], [], 1.5),
        (["0", str(DIGIT)], ["higher"], 1.25),
        (["9", "what?", str(DIGIT)], ["lower", "lower"], 1.0),
        (["9", "9", "9"], ["lower", "lower", "lower"], 0.0),
    ],
)
def test_guesses(guesses, messages, expected):
    assert 0 < DIGIT < 9
    session = Scripted(guesses)
    asyncio.run(solve(SimpleNamespace(id=PROMPT_ID), session))
    texts = [turn.text for turn in session.turns if turn.role == "environment"]
    assert texts == messages
    # A message after the last guess is not part of the response.
    turns = session.turns[:-1] if session.turns[-1].role == "environment" else session.turns
    assert reward(SimpleNamespace(turns=turns, prompt_id=PROMPT_ID)) == expected
