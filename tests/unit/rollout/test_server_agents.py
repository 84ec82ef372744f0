"""Trajectories with fake SGLang servers: real agents, real HTTP."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacs_megatron.config.agent_options import AgentOptions
from pacs_megatron.contracts import Prompt, Sample, SampleRequest
from pacs_megatron.contracts.turns import TurnMarkers
from pacs_megatron.data.turns import TurnEncoder
from pacs_megatron.errors import AgentError, RolloutError
from pacs_megatron.rollout.agent_metrics import agent_metrics
from pacs_megatron.rollout.server_agents import ServerAgents
from tests.support.servers.client import engine, requests, until
from tests.support.servers.replay_sglang import ReplaySglang
from tests.support.tiny_models import save_tokenizer

MARKERS = TurnMarkers(answer_end="", before={"tool": "<"}, after={"tool": ">"}, generation="=")
AGENT = """
import asyncio, os

async def solve(problem, session):
    for _ in range(2):
        await session.generate(max_tokens=6)
        while os.path.exists(WAITS):
            await asyncio.sleep(0.01)
        session.append(await session.call("calculate", expression="6 * 7"))
    await session.generate(max_tokens=6)
"""


def prompt_of(request: SampleRequest) -> Prompt:
    return Prompt(id=request.prompt_id, text="", token_ids=request.token_ids, answer="", problem="")


@contextmanager
def agents(
    folder: Path, servers: Sequence[ReplaySglang], *, code: str = AGENT, **changes: Any
) -> Iterator[ServerAgents]:
    file = folder / "my_agent.py"
    file.write_text(code.replace("WAITS", repr(str(folder / "waits"))))
    options = AgentOptions.model_validate(
        {
            "function": f"{file}:solve",
            "tools": {"calculate": {"kind": "calculator"}},
            "tool_workers": 1,
            "workers": 4,
        }
    )
    tokenizer = save_tokenizer(folder / "tokenizer")

    def decode(ids: np.ndarray) -> str:
        return str(tokenizer.decode(ids.tolist()))

    with engine(servers, **changes) as made:
        encoder = TurnEncoder(MARKERS, tokenizer)
        with ServerAgents(made, options, encoder, [258], decode, prompt_of) as started:
            yield started


@pytest.fixture
def servers() -> Iterator[list[ReplaySglang]]:
    with (
        ReplaySglang(token_s=0.002, median_tokens=4.0, spread=0.5) as first,
        ReplaySglang(token_s=0.002, median_tokens=4.0, spread=0.5) as second,
    ):
        for one in (first, second):
            one.weight_version = "1:aa"
        yield [first, second]


def bodies_of(servers: Sequence[ReplaySglang]) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Sample id -> (number of the server, body) of each of its requests."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, server in enumerate(servers):
        for body in server.bodies:
            found.setdefault(body["rid"].rpartition("/")[0], []).append((number, body))
    return found


def check_exact(sample: Sample, bodies: Sequence[dict[str, Any]]) -> None:
    """Each turn's request has the ids of the trajectory so far."""
    starts = [0, *[end for _, end in sample.environment]]
    sent = sorted((body["input_ids"] for body in bodies), key=len)
    ids = sample.token_ids.tolist()
    assert sent == [ids[: sample.prompt_len + start] for start in starts]


def test_turns_continue_by_ids_on_one_server(tmp_path: Path, servers: list[ReplaySglang]) -> None:
    wanted = requests(8, group=2, tokens=60)
    with agents(tmp_path, servers, max_in_flight=1) as one:
        samples = list(one.stream(wanted))
    assert sorted(sample.id for sample in samples) == sorted(request.id for request in wanted)
    found = bodies_of(servers)
    for sample in samples:
        assert sample.failure is None and sample.num_turns == 3
        numbers = {number for number, _ in found[sample.id]}
        assert len(numbers) == 1, "one server while the trajectory lives"
        check_exact(sample, [body for _, body in found[sample.id]])
        assert len({body["sampling_params"]["sampling_seed"] for _, body in found[sample.id]}) == 3
        # Of a later turn the server had everything but the message.
        blocks = [end - start for start, end in sample.environment]
        assert sample.cached_tokens[0] == 0
        for cached, read, block in zip(
            sample.cached_tokens[1:], sample.read_tokens[1:], blocks, strict=True
        ):
            assert cached == read - block
    metrics = agent_metrics(samples, ["calculate"])
    assert 0 < metrics["agent/cached_frac"] < 1 and metrics["tool/calculate/calls"] == 16


def test_a_turn_goes_to_the_server_of_the_earlier_ones(servers: list[ReplaySglang]) -> None:
    """Also where the other server has less to do: in the second round the trajectories come in the
    other order, and the first request of a round always finds two idle servers.
    """
    turns: queue.SimpleQueue[Sample | BaseException | None] = queue.SimpleQueue()
    first, second = requests(2, group=1, tokens=4)
    num_sent = 0
    with engine(servers) as made:
        for order in ((first, second), (second, first)):
            for server in servers:
                server.paused = True
            for request in order:
                made.submit_turn(request, turns.put)
                num_sent += 1
                assert until(lambda: sum(len(server.bodies) for server in servers) == num_sent)  # noqa: B023
            for server in servers:
                server.paused = False
            for _ in order:
                assert isinstance(turns.get(timeout=600), Sample)
    places = [[number for number, _ in found] for found in bodies_of(servers).values()]
    assert sorted(places) == [[0, 0], [1, 1]]


def test_weights_that_change_between_turns_are_spans(
    tmp_path: Path, servers: list[ReplaySglang]
) -> None:
    (tmp_path / "waits").touch()
    with agents(tmp_path, servers[:1]) as one:
        stream = one.stream(requests(2, group=2, tokens=60))
        made = one._engine
        results: list[Sample] = []
        reader = threading.Thread(target=lambda: results.extend(stream))
        reader.start()
        assert until(lambda: servers[0].answered == 2)
        made.begin_update()
        servers[0].weight_version = "2:bb"
        made.set_current(2, "bb")
        (tmp_path / "waits").unlink()
        reader.join(600)
    for sample in results:
        assert [span.version for span in sample.spans] == [1, 2, 2]
        assert [span.digest for span in sample.spans] == ["aa", "bb", "bb"]
        edges = [0, *np.array(sample.environment).ravel().tolist(), len(sample.response_ids)]
        spans = [(span.start, span.end) for span in sample.spans]
        assert spans == list(zip(edges[::2], edges[1::2], strict=True))


def test_a_server_killed_in_turn_two(tmp_path: Path, servers: list[ReplaySglang]) -> None:
    """The trajectories continue on the other server, from their exact tokens."""
    (tmp_path / "waits").touch()
    with agents(tmp_path, servers) as one:
        stream = one.stream(requests(4, group=1, tokens=60))
        results: list[Sample] = []
        reader = threading.Thread(target=lambda: results.extend(stream))
        reader.start()
        assert until(lambda: sum(server.answered for server in servers) == 4)
        servers[0].refuse()
        (tmp_path / "waits").unlink()
        reader.join(600)
        servers[0].accept()
    assert len(results) == 4 and all(sample.failure is None for sample in results)
    found = bodies_of(servers)
    moved = 0
    for sample in results:
        check_exact(sample, [body for _, body in found[sample.id]])
        moved += len({number for number, _ in found[sample.id]}) == 2
    assert moved


def test_cancelled_trajectories_have_no_sample(tmp_path: Path, servers: list[ReplaySglang]) -> None:
    (tmp_path / "waits").touch()
    wanted = requests(6, group=2, tokens=60)
    with agents(tmp_path, servers) as one:
        stream = one.stream(wanted)
        one_at_a_time = iter(stream)
        timer = threading.Timer(0.5, lambda: one.cancel([request.id for request in wanted[:5]]))
        timer.start()
        threading.Timer(1.0, (tmp_path / "waits").unlink).start()
        assert [sample.id for sample in one_at_a_time] == [wanted[5].id]


def test_a_turn_that_fails_at_each_try_is_the_error_of_the_stream(
    tmp_path: Path, servers: list[ReplaySglang]
) -> None:
    servers[0].raw["/generate"] = b"no HTTP"
    failing = agents(tmp_path, servers[:1], retries=1)
    with failing as one, pytest.raises(RolloutError, match="failed 2 times"):
        list(one.stream(requests(1, tokens=60)))


def test_the_end_of_the_agents_is_the_error_of_the_stream(
    tmp_path: Path, servers: list[ReplaySglang]
) -> None:
    with agents(tmp_path, servers) as one:
        one._failed(AgentError("no more agents"))
        with pytest.raises(AgentError, match="no more agents"):
            list(one.stream(requests(1, tokens=60)))
