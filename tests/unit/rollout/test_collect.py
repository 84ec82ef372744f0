"""Requests of the ranks to a driver whose servers lose their weights repeatedly: real ranks, a
scripted driver.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.errors import RolloutError
from pacs_megatron.parallel.control import ControlChannel
from pacs_megatron.rollout.collect import Rollouts
from pacs_megatron.rollout.driver_client import DriverClient
from pacs_megatron.rollout.wire import Connection
from tests.support.ranks import rank_of, run_ranks

MOST_RESENDS = 5


def connected(folder: str) -> tuple[DriverClient, Connection]:
    """Rank 0's client, and the other end of its socket instead of the process."""
    client = DriverClient(Path(folder), Path(folder), timeout_s=600.0)
    client._process.kill()
    client._connection.close()
    ours, theirs = socket.socketpair()
    client._connection = Connection(ours, "rollout driver")
    return client, Connection(theirs, "trainer")


def evaluate(rank: int, world: int, stale_responses: int) -> tuple[list[int], Any, list[str]]:
    """(steps of the weights sent, the response or the error, requests that the driver received)"""
    sent: list[int] = []
    requests: list[str] = []

    def serve(driver: Connection) -> None:
        for number in range(stale_responses + 1):
            request, _ = driver.receive()
            requests.append(f"{request['op']} {request['step']}")
            kind = "stale" if number < stale_responses else "evaluation"
            driver.send({"kind": kind, "request": request["request"], "benchmarks": {"test": []}})
            if number == MOST_RESENDS:
                return

    with tempfile.TemporaryDirectory() as folder:
        client = None
        if rank == 0:
            client, driver = connected(folder)
            thread = threading.Thread(target=serve, args=(driver,))
            thread.start()
        one = rank_of(rank, tp=world)
        rollouts = Rollouts(ControlChannel(one), client, None, should_stop=lambda: False)
        rollouts.send_weights = sent.append
        result: Any
        try:
            result = rollouts.evaluate(7)
        except RolloutError as error:
            result = str(error)
        if client is not None:
            thread.join()
            driver.close()
            client.close()
    return sent, result, requests


@pytest.mark.parametrize("stale_responses", [0, 1, MOST_RESENDS, MOST_RESENDS + 1])
def test_weights_are_sent_again_a_bounded_number_of_times(stale_responses: int) -> None:
    results = run_ranks(lambda rank, world: evaluate(rank, world, stale_responses), 2)
    for rank, (sent, result, requests) in enumerate(results):
        assert sent == [7] * min(stale_responses, MOST_RESENDS)
        if stale_responses > MOST_RESENDS:
            assert result.startswith(
                f"the rollout servers lost their weights {MOST_RESENDS + 1} times"
            )
            assert "servers/" in result and "\n" not in result
        else:
            assert result == {"test": []}
        assert requests == (["evaluate 7"] * (len(sent) + 1) if rank == 0 else [])
