"""The order of the driver's responses, requests and file writes: a real driver, its socket, a light
server.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.embedded.engine import Vocabulary
from pacs_megatron.observability.rollout_log import rollout_path, write_rollouts
from pacs_megatron.rollout import driver as driver_module
from pacs_megatron.rollout import step_results
from pacs_megatron.rollout.driver import Driver
from pacs_megatron.rollout.step_rollouts import StepRollouts
from pacs_megatron.rollout.wire import Connection
from pacs_megatron.sglang.api import WeightVersion
from tests.support.servers.replay_sglang import ReplaySglang
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

WAIT_S = 600.0
MARKERS = {"answer_end": "", "before": {"tool": "<"}, "after": {"tool": ">"}, "generation": "="}
AGENT = """
async def solve(problem, session):
    await session.generate(max_tokens=6)
    session.append(await session.call("calculate", expression="6 * 7"))
    await session.generate(max_tokens=6)
"""


class Trainer:
    """Rank 0's end of the socket, and the driver's actions in their order."""

    def __init__(self, folder: Path, server: ReplaySglang, *overrides: str) -> None:
        model = make_tiny_qwen3(folder / "model", num_hidden_layers=1, vocab_size=262)
        rollout = (
            f"{{engine: sglang, urls: ['{server.url}'], max_staleness: 1, sync: {{transport: "
            f"disk}}, sampling: {{max_response_tokens: 16}}}}"
        )
        config = load_config(
            write_tiny_run(folder, model), ("run.steps=9", f"rollout={rollout}", *overrides)
        ).config
        ours, theirs = socket.socketpair()
        self.folder = folder
        self.events: list[str] = []
        self._server = server
        self._connection = Connection(ours, "driver")
        self._number = 0
        self._other_end = Connection(theirs, "trainer")
        self.driver = Driver(config, folder, model, self._other_end)
        self._record()
        self._thread = threading.Thread(target=self.driver.serve)
        self._thread.start()
        self.ready = self.next()
        assert self.ready["kind"] == "ready"
        self.events.clear()

    def _record(self) -> None:
        start = self.driver._buffer.start
        send = self._other_end.send

        def record_start(rollouts: StepRollouts, *, urgent: bool = False) -> None:
            if not rollouts.started:
                self.events.append(f"start {rollouts.step}")
            start(rollouts, urgent=urgent)

        def record_send(header: Any, arrays: Any = None) -> None:
            if header["kind"] != "progress":
                self.events.append(f"response {header['kind']}")
            send(header, arrays)

        self.driver._buffer.start = record_start  # type: ignore[method-assign]
        self._other_end.send = record_send  # type: ignore[method-assign]

    def send(self, **request: Any) -> None:
        self._number += 1
        self._connection.send({**request, "request": self._number})

    def next(self) -> dict[str, Any]:
        while True:
            assert self._connection.poll(WAIT_S), self.events
            header, _ = self._connection.receive()
            if header["kind"] != "progress":
                return header

    def send_weights(self, trained: int) -> None:
        weights = WeightVersion(trained, f"weights{trained}")
        self.send(op="begin_update", is_release=False)
        assert self.next()["kind"] == "updating"
        self._server.weight_version = str(weights)
        self.send(op="set_current", version=weights.version, digest=weights.digest, trained=trained)
        assert self.next()["kind"] == "current"

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.events
            time.sleep(0.002)

    def close(self) -> None:
        self._connection.send({"op": "close"})
        self._thread.join(WAIT_S)
        self.driver.close()
        self._connection.close()
        self._other_end.close()


@contextmanager
def trainer(folder: Path, *overrides: str) -> Iterator[tuple[Trainer, ReplaySglang]]:
    with ReplaySglang(token_s=0.0, median_tokens=6.0, spread=0.5) as server:
        one = Trainer(folder, server, *overrides)
        try:
            yield one, server
        finally:
            one.close()


def test_a_finished_step_goes_out_before_requests_for_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer(tmp_path) as (one, server):
        # So long that only the response ends the delay.
        monkeypatch.setattr(driver_module, "_START_DELAY_S", WAIT_S)
        one.send_weights(0)
        one.send(op="rollout", step=1)
        assert one.next()["kind"] == "groups"
        # Step 1 was not finished at its request, so later steps start at once.
        assert one.events[2:] == ["start 1", "start 2", "response groups"]
        ahead = one.driver._buffer.dispatch(2, 2)[0]
        one.until(lambda: ahead.is_done)
        one.events.clear()
        one.send_weights(1)
        one.send(op="rollout", step=2)
        assert one.next()["kind"] == "groups"
        one.until(lambda: "start 3" in one.events)
        assert one.events == ["response updating", "response current", "response groups", "start 3"]
        one.until(lambda: any(rid.startswith("3:") for rid in server.asked))


def test_trajectories_of_agents_are_sampled_ahead(tmp_path: Path) -> None:
    """Those of step 2 start with the weights of step 1, and keep them."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    agent = {
        "function": f"{tmp_path / 'my_agent.py'}:solve",
        "turn_markers": MARKERS,
        "tools": {"calculate": {"kind": "calculator"}},
        "tool_workers": 1,
        "workers": 4,
    }
    settings = (f"rollout.agent={json.dumps(agent)}", "reward.max_failure_frac=1")
    with trainer(tmp_path, *settings) as (one, server):
        one.send_weights(0)
        one.send(op="rollout", step=1)
        header = one.next()
        assert header["kind"] == "groups"
        metrics = header["metrics"]
        assert metrics["agent/turns_max"] == 2 and metrics["tool/calculate/calls"] == 16
        assert 0 < metrics["agent/cached_frac"] < 1 and metrics["agent/failed"] == 0

        ahead = one.driver._buffer.dispatch(2, 2)[0]
        one.until(lambda: ahead.is_done)
        one.send_weights(1)
        one.send(op="rollout", step=2)
        metrics = one.next()["metrics"]
        assert metrics["staleness/max"] == 1 and metrics["agent/turns_max"] == 2
        record = one.driver._buffer.dispatch(2, 2)[0].in_order()[0]
        assert record.environment and record.sampler_logprobs.shape == record.response_ids.shape
        bodies = [body for body in server.bodies if body["rid"].startswith(f"{record.id}/")]
        sent = max((body["input_ids"] for body in bodies), key=len)
        assert record.token_ids[: len(sent)].tolist() == sent


def test_every_engine_has_the_same_stop_tokens(tmp_path: Path) -> None:
    with trainer(tmp_path) as (one, server):
        tokenizer = one.driver._tokenizer
        stops = Vocabulary.from_tokenizer(tokenizer, str(tmp_path / "model")).eos_token_ids
        assert one.ready["stop_token_ids"] == sorted(stops) == [258]
        asked: list[list[int]] = []
        tokens = server.tokens

        def record(body: dict[str, Any]) -> list[int]:
            asked.append(body["sampling_params"]["stop_token_ids"])
            return tokens(body)

        server.tokens = record  # type: ignore[method-assign]
        one.send_weights(0)
        one.send(op="rollout", step=1)
        assert one.next()["kind"] == "groups"
        assert asked and all(stops == [258] for stops in asked)


def test_servers_receive_later_steps_without_a_request_of_rank_0(tmp_path: Path) -> None:
    with trainer(tmp_path) as (one, server):
        one.send_weights(0)
        one.until(lambda: {rid.partition(":")[0] for rid in server.asked} == {"1", "2"})
        assert one.events == ["response updating", "response current", "start 1", "start 2"]


def test_rollouts_are_written_between_their_response_and_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def record_write(path: Path, *rest: Any) -> None:
        assert may_write.wait(WAIT_S)
        write_rollouts(path, *rest)
        one.events.append(f"write {path.stem}")

    monkeypatch.setattr(step_results, "write_rollouts", record_write)
    with trainer(tmp_path) as (one, _server):
        one.send_weights(0)
        one.send(op="rollout", step=1)
        assert one.next()["kind"] == "groups"
        path = rollout_path(tmp_path, 1)
        assert not path.exists()
        one.send(op="state", trained=0, final=False)
        may_write.set()
        assert one.next()["kind"] == "state"
        assert path.read_bytes().count(b"\n") == 16
        assert one.events[-3:] == ["response groups", "write step_000001", "response state"]


def test_the_servers_that_are_not_dead(tmp_path: Path) -> None:
    with trainer(tmp_path) as (one, server):
        one.send(op="servers")
        assert one.next()["urls"] == [server.url]
