"""Training steps of agents: a real driver, real agents and tools, the real embedded engine."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacs_megatron.batching.tables import FACTS
from pacs_megatron.config import load_config
from pacs_megatron.contracts import SampleFacts, TokenBuffers, Writer
from pacs_megatron.errors import AgentError, ConfigError
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from pacs_megatron.parallel.transfer import pack_arrays, unpack_arrays
from pacs_megatron.rollout.driver import Driver
from pacs_megatron.rollout.sample_arrays import (
    Message,
    Reply,
    requests_from_message,
    samples_to_message,
)
from pacs_megatron.rollout.wire import Connection
from tests.support.rollout import embedded_engine
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import with_agent, write_tiny_run

ROOT = Path(__file__).parents[3]
WAIT_S = 600.0
SOME_END_EARLY = """
async def solve(problem, session):
    number = int(problem.id.rpartition("/")[2])
    await session.generate(max_tokens=3)
    if number % 4 == 1:
        raise ValueError("no luck")
    if number > 4:
        return
    session.append(await session.call("calculate", expression=f"{number} * 3"))
    await session.generate(max_tokens=4)
"""

CALLS_WRONGLY = """
async def solve(problem, session):
    number = int(problem.id.rpartition("/")[2])
    await session.generate(max_tokens=3)
    session.append(await session.call("calculate", expression=f"{number} * 1"))
    await session.generate(max_tokens=4)
    await session.call("calculate", expression="x")
"""
JUDGES_ITSELF = """
async def solve(problem, session):
    number = int(problem.id.rpartition("/")[2])
    assert int(problem.answer) == number // 4 + number % 4
    if number == 5:
        await session.generate()
        return
    await session.generate(max_tokens=3)
    if number == 4:
        session.append("x" * 100)
        await session.generate()
    if number % 4 == 1:
        return number / 8
    return number % 4 == 2
"""
REWARD_OF_TURNS = """
from pacs_megatron.contracts import Judgement

def reward(sample):
    seen = []
    for turn in sample.turns:
        calls = [[call.tool, call.arguments, call.failure] for call in turn.calls]
        seen.append([turn.role, turn.text, calls])
    return Judgement(1.0, {"seen": seen})
"""


class Trainer:
    """Rank 0's part of a step, with a driver in this process."""

    def __init__(self, folder: Path, model: Path, *overrides: str, agent: str = "") -> None:
        config = with_agent(write_tiny_run(folder, model), agent)
        loaded = load_config(config, ("reward.max_failure_frac=1", *overrides))
        self.folder = folder
        """of the run"""
        self.rounds: list[int] = []
        """number of turns of each round"""
        self.engine = embedded_engine(model, batch_sequences=8)
        self._ours, self._theirs = socket.socketpair()
        self.driver = Driver(loaded.config, folder, model, Connection(self._ours, "trainer"))
        assert self.engine.digest is not None
        self.driver.set_current(0, self.engine.digest, 0)

    def messages(self) -> Iterator[Message]:
        """The messages of the open request but progress."""
        while True:
            request = self.driver._request
            assert request is not None
            message = request.advance()
            if message is None or message[0]["kind"] == "progress":
                ready, _, _ = select.select([self.driver._woken], [], [], WAIT_S)
                assert ready, "the step has stalled"
                self.driver._woken.recv(1 << 16)
                continue
            yield message

    def sample(self, message: Message) -> None:
        """Samples a round, as the ranks do, and delivers it."""
        requests = requests_from_message(*message)
        self.rounds.append(len(requests))
        header, arrays = samples_to_message(list(self.engine.stream(requests)))
        assert self.driver._request is not None
        number = self.driver._request.number
        self.driver._handle({"op": "samples", "request": number, **header}, arrays)

    def response(self) -> Message:
        """The response of the open request, with all of its rounds sampled."""
        for message in self.messages():
            if message[0]["kind"] != "generate":
                return message
            self.sample(message)
        raise AssertionError

    def close(self) -> None:
        self.driver.close()
        self._ours.close()
        self._theirs.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=1, vocab_size=262)


@pytest.fixture
def trainer(tmp_path: Path, model: Path) -> Iterator[Callable[..., Trainer]]:
    opened: list[Trainer] = []

    def start(*overrides: str, folder: str = "one", agent: str = "") -> Trainer:
        (tmp_path / folder).mkdir(exist_ok=True)
        opened.append(Trainer(tmp_path / folder, model, *overrides, agent=agent))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def facts_and_tokens(reply: Reply) -> tuple[SampleFacts, TokenBuffers]:
    """The step's columns as rank 0 receives them."""
    header, sent = reply
    arrays = unpack_arrays(pack_arrays(sent))
    facts = {name: arrays[name] for name in FACTS}
    tokens = {name: values for name, values in arrays.items() if name not in FACTS}
    return SampleFacts(ids=tuple(header["ids"]), **facts), TokenBuffers(**tokens)


def test_a_step_of_trajectories(trainer: Callable[..., Trainer]) -> None:
    one = trainer()
    one.driver.rollout(1, 1)
    response = one.response()
    facts, tokens = facts_and_tokens(response)
    metrics = response[0]["metrics"]
    assert one.rounds[0] == 16, "the first round has all trajectories"

    one.driver._results.write_pending()
    records = {record["id"]: record for record in read_rollouts(rollout_path(one.folder, 1))}
    assert len(records) == 16
    failed = [record for record in records.values() if record["failure"] is not None]
    assert metrics["agent/failed"] == metrics["admission/dropped_unjudged"] == len(failed) == 4
    assert set(facts.ids) == records.keys() - {record["id"] for record in failed}

    for position, sample_id in enumerate(facts.ids):
        record = records[sample_id]
        roles = [turn["role"] for turn in record["turns"]]
        assert roles == ["assistant", "environment", "assistant"]
        assert record["response"] == f"{record['turns'][0]['text']}\n{record['turns'][2]['text']}"
        calls = [turn["calls"] for turn in record["turns"]]
        assert [len(made) for made in calls] == [1, 0, 0] and calls[0][0]["turn"] == 1
        [(start, end)] = record["environment"]
        writers = tokens.writers[tokens.offsets[position] : tokens.offsets[position + 1]]
        is_environment = writers[record["prompt_tokens"] :] == Writer.ENVIRONMENT
        assert np.flatnonzero(is_environment).tolist() == list(range(start, end))
        assert facts.environment_lens[position] == end - start
        assert facts.response_lens[position] == record["response_tokens"]

    assert metrics["tool/calculate/calls"] == 12
    assert metrics["tool/calculate/failures"] == 0
    assert metrics["agent/tool_use_frac"] == 12 / 16
    assert metrics["agent/turns_max"] == 2


def test_the_reward_sees_turns_calls_and_errors(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """The reward writes what it sees as its details."""
    file = tmp_path / "reward_of_turns.py"
    file.write_text(REWARD_OF_TURNS)
    one = trainer(f"reward.function={file}:reward", agent=CALLS_WRONGLY)
    one.driver.rollout(1, 1)
    one.response()
    one.driver._results.write_pending()
    for record in read_rollouts(rollout_path(one.folder, 1)):
        number = record["prompt_id"].rpartition("/")[2]
        texts = [turn["text"] for turn in record["turns"]]
        assert texts[1] == f"<{number}>="
        failure = "unexpected 'x'"
        assert record["reward_details"]["seen"] == [
            ["assistant", texts[0], [["calculate", f'{{"expression": "{number} * 1"}}', None]]],
            ["environment", texts[1], []],
            ["assistant", texts[2], [["calculate", '{"expression": "x"}', failure]]],
        ]


OWN = ("reward={name: agent, label_threshold: 0.5, max_failure_frac: 1}",)


def test_agents_that_judge_themselves(trainer: Callable[..., Trainer]) -> None:
    one = trainer(*OWN, "rollout.agent.reads_answers=true", agent=JUDGES_ITSELF)
    one.driver.rollout(1, 1)
    facts, _ = facts_and_tokens(one.response())
    one.driver._results.write_pending()
    seen = {}
    for record in read_rollouts(rollout_path(one.folder, 1)):
        number = int(record["prompt_id"].rpartition("/")[2])
        seen[number] = (record["reward"], record["label"], record["stop"])
        if number == 5 and record["stop"] == "eos":
            assert record["failure"].startswith("agent: solve returned None, expected a number")
            continue
        expected = number / 8 if number % 4 == 1 else float(number % 4 == 2)
        if record["stop"] == "length":
            expected = 0.0
        assert (record["reward"], record["label"]) == (expected, int(expected >= 0.5))
    assert facts.num_samples > 8 and len(seen) == 4


def test_the_own_reward_of_an_agent_stays_through_a_stop(trainer: Callable[..., Trainer]) -> None:
    agent = SOME_END_EARLY.replace("        return\n", "        return number\n") + "    return 0\n"
    one = trainer(*OWN, agent=agent)
    one.driver.rollout(1, 1)
    messages = one.messages()
    one.sample(next(messages))
    next(messages)
    one.driver._handle({"op": "abandon", "request": 1}, {})
    header, arrays = one.driver.state(0, final=False)
    finished = [
        float(sample_id.rpartition("#")[0].rpartition("/")[2])
        for sample_id in header["buffer"]["ids"]
    ]
    assert finished and header["buffer"]["own_rewards"] == finished

    judged_by_text = trainer("reward.label_threshold=0.5", agent=agent)
    judged_by_text.driver.load_state(header, arrays)
    judged_by_text.driver.rollout(2, 1)
    judged_by_text.response()
    judged_by_text.driver._results.write_pending()
    for record in read_rollouts(rollout_path(judged_by_text.folder, 1)):
        assert record["failure"].startswith("agent: "), "two rewards: none of them is dropped"


def test_a_step_of_the_example_game(trainer: Callable[..., Trainer]) -> None:
    game = ROOT / "examples" / "tools" / "game.py"
    settings = f"reward={{name: custom, function: '{game}:reward', label_threshold: 0.5}}"
    one = trainer(settings, agent=game.read_text())
    one.driver.rollout(1, 1)
    facts, _ = facts_and_tokens(one.response())
    assert facts.num_samples == 16
    assert facts.labels.tolist() == (facts.rewards >= 0.5).astype(float).tolist()
    one.driver._results.write_pending()
    for record in read_rollouts(rollout_path(one.folder, 1)):
        turns = record.get("turns", [])
        texts = [turn["text"] for turn in turns if turn["role"] == "environment"]
        assert len(texts) <= 2 and set(texts) <= {"<higher>=", "<lower>="}


def test_an_evaluation_of_trajectories(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    path = tmp_path / "one" / "train.jsonl"
    columns = "{problem: problem, answer: answer}"
    one = trainer(
        f"evaluation.benchmarks=[{{name: sums, path: '{path}', limit: 3, columns: {columns}}}]",
        "evaluation.samples_per_prompt=2",
        "evaluation.sampling={max_response_tokens: 40}",
    )
    one.driver.evaluate(1, 0)
    header, _ = one.response()
    [counts] = header["benchmarks"].values()
    assert header["kind"] == "evaluation" and len(counts) == 3
    assert one.rounds[0] == 6
    records = read_rollouts(rollout_path(one.folder, 0, "eval"))
    assert any("turns" in record for record in records)


def test_finished_trajectories_keep_their_bits_through_a_stop(
    trainer: Callable[..., Trainer],
) -> None:
    """A stop request between two rounds; the open trajectories start again."""
    one = trainer(agent=SOME_END_EARLY)
    one.driver.rollout(1, 1)
    messages = one.messages()
    one.sample(next(messages))
    next(messages)  # the second round, which is never sampled
    one.driver._handle({"op": "abandon", "request": 1}, {})
    header, arrays = one.driver.state(0, final=False)
    before = tokens_by_id(header, arrays)
    assert len(before) == 8, "the agents that failed and those of two turns are not finished"

    again = trainer(agent=SOME_END_EARLY)
    again.driver.load_state(header, arrays)
    again.driver.rollout(2, 1)
    facts, _ = facts_and_tokens(again.response())
    assert again.rounds == [8, 4]
    after = tokens_by_id(*again.driver.state(0, final=False))
    assert {sample_id: after[sample_id] for sample_id in before} == before
    assert len(after) == 16, "a step that the ranks have keeps the agents that failed"
    assert facts.num_samples == 12


def test_an_error_of_the_agents_is_the_error_of_the_step(trainer: Callable[..., Trainer]) -> None:
    one = trainer()
    one.driver.rollout(1, 1)
    assert one.driver._agents is not None
    one.driver._agents._rounds._failed(AgentError("no more agents"))
    with pytest.raises(AgentError, match="no more agents"):
        one.response()


def test_a_changed_agent_is_a_line_of_the_resumed_attempt(
    trainer: Callable[..., Trainer],
) -> None:
    header, arrays = trainer().driver.state(0, final=False)
    same, _ = trainer().driver.load_state(header, arrays)
    assert same["notices"] == []
    other, _ = trainer(agent=SOME_END_EARLY).driver.load_state(header, arrays)
    assert len(other["notices"]) == 1 and "the agent changed" in other["notices"][0]


def test_an_agent_that_cannot_be_loaded(trainer: Callable[..., Trainer]) -> None:
    with pytest.raises(ConfigError, match="no async function"):
        trainer(agent="def solve(problem, session):\n    return 1\n")


def tokens_by_id(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    """The bits of each sample of a driver's state: token ids and log-probs."""
    found = {}
    for place, sample_id in enumerate(header["buffer"]["ids"]):
        bits = b""
        for name, bounds in (("token_ids", "offsets"), ("logprobs", "logprob_offsets")):
            start, end = arrays[bounds][place : place + 2]
            bits += arrays[name][start:end].tobytes()
        found[sample_id] = bits
    return found
