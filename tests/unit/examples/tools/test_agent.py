"""The agent of examples/tools, with a policy from a script."""

import asyncio
from pathlib import Path

import pytest

from examples.tools.agent import MAX_CALLS, solve
from pacs_megatron.agents.session import Answer
from pacs_megatron.config import load_config

ROOT = Path(__file__).parents[4]


class Scripted:
    def __init__(self, turns):
        self._turns = iter(turns)
        self.messages = []
        self.num_turns = 0

    async def generate(self, *, stop=()):
        self.num_turns += 1
        text = next(self._turns)
        return Answer(text, "eos", len(text))

    def append(self, text):
        self.messages.append(text)

    async def call(self, tool, **arguments):
        assert tool == "calculator"
        return f"value of {arguments['expression']}"


@pytest.mark.parametrize(
    ("turns", "messages"),
    [
        (["just 42"], []),
        (["<calc>6 * 7</calc>", "42"], ["value of 6 * 7"]),
        (["<calc>1</calc> <calc>2</calc>", "<calc>3</calc>", "4"], ["value of 2", "value of 3"]),
        (["<calc>1</calc>"] * 9, ["value of 1"] * MAX_CALLS),
        (["<calc>1", "never"], []),
    ],
)
def test_the_example_solves(turns, messages):
    session = Scripted(turns)
    asyncio.run(solve(None, session))
    assert session.messages == messages
    assert session.num_turns == len(messages) + 1


def test_its_configuration(monkeypatch):
    monkeypatch.chdir(ROOT)
    agent = load_config(Path("examples/tools/eval.yaml")).config.rollout.embedded.agent
    assert (agent.function, list(agent.tools)) == ("examples/tools/agent.py:solve", ["calculator"])
