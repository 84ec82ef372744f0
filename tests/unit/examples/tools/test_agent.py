"""The agent of examples/tools, with a policy from a script."""

import asyncio
from pathlib import Path

import pytest

from examples.tools.agent import MAX_CALLS, solve, solve_with_python
from pacs_megatron.agents.files import agent_digests
from pacs_megatron.agents.session import Answer
from pacs_megatron.agents.worker import load_agent
from pacs_megatron.config import load_config

ROOT = Path(__file__).parents[4]


class Scripted:
    def __init__(self, turns):
        self._turns = iter(turns)
        self.messages = []
        self.num_turns = 0

    async def generate(self, *, stop=()):
        self.num_turns += 1
        self.stops = stop
        text = next(self._turns)
        return Answer(text, "eos", len(text))

    def append(self, text):
        self.messages.append(text)

    async def call(self, tool, **arguments):
        if tool == "python":
            return f"output of {arguments['code']}"
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


def test_a_program_or_an_expression():
    session = Scripted(["<python>print(1)</python>", "so <calc>6 * 7</calc>", "42"])
    asyncio.run(solve_with_python(None, session))
    assert session.messages == ["output of print(1)", "value of 6 * 7"]


def test_the_shipped_run_has_its_tools(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(Path("configs/runs/pacs-qwen3-8b-1n8g-tools.yaml")).config
    agent = config.rollout.agents
    assert agent.function == "examples/tools/agent.py:solve_with_python"
    assert [tool.kind for tool in agent.tools.values()] == ["calculator", "python"]
    assert load_agent(agent.function) is not None and list(agent_digests(agent))


def test_its_configuration(monkeypatch):
    monkeypatch.chdir(ROOT)
    agent = load_config(Path("examples/tools/eval.yaml")).config.rollout.embedded.agent
    assert (agent.function, list(agent.tools)) == ("examples/tools/agent.py:solve", ["calculator"])
