"""Trajectories of agents with the real embedded engine, without processes of ranks."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pacs_megatron.config.agent_options import AgentOptions
from pacs_megatron.config.schema import DataOptions, TrainOptions
from pacs_megatron.contracts import Prompt, Stop
from pacs_megatron.contracts.conversation import policy_text, turns_of
from pacs_megatron.contracts.turns import TurnMarkers
from pacs_megatron.errors import AgentError, DataError, RolloutError
from pacs_megatron.rollout.agent_rounds import AgentRounds, build_encoder
from pacs_megatron.rollout.run_prompts import first_time
from tests.support.rollout import embedded_engine, random_prompts, requests_for, sampling

MARKERS = TurnMarkers(answer_end="", before={"tool": "<"}, after={"tool": ">"}, generation="=")
AGENT = """
import time

async def solve(problem, session):
    number = int(problem.id[2:])
    for turn in range(1 + number % 3):
        answer = await session.generate(max_tokens=2 + number % 2)
        if number == 4 and turn == 1:
            raise ValueError("no luck")
        value = await session.call("calculate", expression=str(number) + " * 3")
        time.sleep(0.01 * (number % 2))
        session.append(value)
    await session.generate(max_tokens=3)
"""

DIES = """
import os, threading, time

async def solve(problem, session):
    if problem.id == "p/0":
        threading.Timer(0.3, os._exit, (7,)).start()
    else:
        time.sleep(2)
    await session.generate(max_tokens=2)
"""


class Running:
    """Rounds of one step, played to their end."""

    def __init__(self, tmp_path, folder, *, workers=16, agent=AGENT, **changes):
        file = tmp_path / "my_agent.py"
        file.write_text(agent)
        options = AgentOptions.model_validate(
            {
                "function": f"{file}:solve",
                "tools": {"calculate": {"kind": "calculator"}},
                "tool_workers": 1,
                "workers": workers,
                "turn_markers": MARKERS,
                **changes,
            }
        )
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.engine = embedded_engine(folder, batch_sequences=4)
        data = DataOptions(train=TrainOptions(path="unused.json", preset="deepscaler"))
        encoder = build_encoder(options, data, self.tokenizer, first_time(tmp_path))
        self.rounds = AgentRounds(options, encoder, [258], self.decode)
        self.sizes: list[int] = []

    def decode(self, ids):
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def sample_turns(self, turns):
        self.sizes.append(len(turns))
        return self.engine.stream(turns)

    def play(self, requests, prompts):
        """The samples, in the order of the requests, and the sizes of the rounds."""
        self.sizes = []
        played = self.rounds.play(requests, prompts, self.sample_turns)
        found = {sample.id: sample for sample in played}
        return [found[request.id] for request in requests], self.sizes


def step_of(count, *, max_tokens=60):
    """Requests and prompts."""
    tokens = random_prompts(count, seed=5)
    prompts = {}
    for number, ids in enumerate(tokens):
        prompts[f"p/{number}"] = Prompt(
            id=f"p/{number}", text="", token_ids=np.array(ids), answer="", problem="x"
        )
    return requests_for(tokens, params=sampling(max_tokens=max_tokens)), prompts


@pytest.fixture
def running(tmp_path, tiny_qwen3):
    opened = []

    def start(**changes):
        opened.append(Running(tmp_path, tiny_qwen3, **changes))
        return opened[-1]

    yield start
    for one in opened:
        one.rounds.close()


def test_log_probs_are_those_of_the_exact_tokens(running, tiny_qwen3):
    """Against one forward of `transformers` over the whole trajectory."""
    played = running()
    samples, sizes = played.play(*step_of(7))
    assert sizes == [7, 7, 3, 2], "each round has all open trajectories"
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()
    for number, sample in enumerate(samples):
        assert len(sample.environment) == (1 if number == 4 else 1 + number % 3)
        with torch.no_grad():
            logits = model(torch.tensor(sample.token_ids[None].astype(np.int64))).logits[0]
        logprobs = torch.log_softmax(logits.float(), -1)[sample.prompt_len - 1 : -1]
        ids = torch.tensor(sample.response_ids.astype(np.int64))
        expected = logprobs.gather(1, ids[:, None])[:, 0].numpy()
        is_policy = np.ones(len(sample.response_ids), dtype=bool)
        for start, end in sample.environment:
            is_policy[start:end] = False
            text = played.decode(sample.response_ids[start:end])
            assert text == f"<{number * 3}>="
        np.testing.assert_allclose(
            sample.sampler_logprobs[is_policy], expected[is_policy], atol=2e-5
        )
        assert is_policy[-1] and sample.response_len == is_policy.sum()
        assert is_policy.sum() == sum(span.end - span.start for span in sample.spans)


def test_an_agent_that_fails_fails_alone(running):
    samples, _ = running().play(*step_of(7))
    assert [sample.failure for sample in samples if sample.failure] == [
        "agent: it raised ValueError: no luck"
    ]
    assert samples[4].failure is not None and len(samples[4].spans) == 2


def test_the_same_bits_each_time_and_the_same_tokens_with_fewer_workers(running):
    first, _ = running().play(*step_of(7))
    second, _ = running().play(*step_of(7))
    few, sizes = running(workers=2).play(*step_of(7))
    assert max(sizes) == 2
    for one, same, other in zip(first, second, few, strict=True):
        assert one.token_ids.tobytes() == same.token_ids.tobytes()
        assert one.sampler_logprobs.tobytes() == same.sampler_logprobs.tobytes()
        assert one.token_ids.tolist() == other.token_ids.tolist()


def test_one_turn_has_the_bits_of_a_run_without_agent(running):
    agent = "async def solve(problem, session):\n    await session.generate()\n"
    played = running(agent=agent)
    requests, prompts = step_of(6, max_tokens=12)
    samples, _ = played.play(requests, prompts)
    for sample, plain in zip(samples, played.engine.stream(requests), strict=True):
        assert sample.token_ids.tobytes() == plain.token_ids.tobytes()
        assert sample.sampler_logprobs.tobytes() == plain.sampler_logprobs.tobytes()
        assert (sample.stop, sample.spans) == (plain.stop, plain.spans)


@pytest.mark.full
def test_after_an_abandoned_play_open_trajectories_start_again(running):
    played = running()
    with closing(played.rounds.play(*step_of(7), played.sample_turns)) as samples:
        next(samples)
    again, sizes = played.play(*step_of(7))
    assert sizes == [7, 7, 3, 2]
    expected, _ = running().play(*step_of(7))
    for one, other in zip(again, expected, strict=True):
        assert one.token_ids.tobytes() == other.token_ids.tobytes()


@pytest.mark.full
def test_an_error_of_the_policy_ends_the_play(running):
    def fail(_turns):
        raise RolloutError("no weights")

    played = running()
    with pytest.raises(RolloutError, match="no weights"):
        list(played.rounds.play(*step_of(3), fail))
    assert len(played.play(*step_of(3))[0]) == 3


def test_a_worker_that_dies_while_it_waits_for_a_turn(running):
    """The round waits, because the other agent is still busy."""
    samples, sizes = running(agent=DIES).play(*step_of(2))
    assert samples[0].failure == "agent: its worker died (exit code 7)"
    assert samples[1].failure is None and sizes == [1]


def test_the_verifier_reads_the_policy_only(running):
    played = running()
    [sample] = played.play(*step_of(1))[0]
    [(start, end)] = sample.environment
    turns = turns_of(sample, played.decode)
    texts = [(turn.role, turn.text) for turn in turns]
    first = played.decode(sample.response_ids[:start])
    last = played.decode(sample.response_ids[end:])
    assert texts == [("assistant", first), ("environment", "<0>="), ("assistant", last)]
    assert policy_text(turns) == f"{first}\n{last}"
    plain = replace(sample, environment=())
    assert policy_text(turns_of(plain, played.decode)) == played.decode(sample.response_ids)


def test_a_response_that_is_too_long(running):
    samples, _ = running().play(*step_of(3, max_tokens=6))
    assert {sample.stop for sample in samples} == {Stop.LENGTH}
    assert all(len(sample.response_ids) <= 6 for sample in samples)


def test_the_end_of_the_pool_is_an_error(running):
    played = running()
    played.rounds._failed(AgentError("no more agents"))
    with pytest.raises(AgentError, match="no more agents"):
        played.play(*step_of(3))


def test_a_template_without_markers_needs_those_of_the_configuration(tmp_path, tiny_qwen3):
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3)
    tokenizer.chat_template = None
    options = AgentOptions(function="my_agent:solve")
    data = DataOptions(train=TrainOptions(path="unused.json", preset="deepscaler"))
    with pytest.raises(DataError, match="turn_markers"):
        build_encoder(options, data, tokenizer, first_time(tmp_path))
