"""The exchange between ranks: values arrive, and a wait that would never end is found at once."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import Pipe
from threading import Thread
from typing import Any

import pytest

from pacs_megatron.workbench.trace.collectives import Collective
from pacs_megatron.workbench.trace.exchange import EndlessWaitError, Exchange, Exchanges


def call(place: str, operation: str = "allreduce_", **options: Any) -> Collective:
    values: dict[str, Any] = {
        "operation": operation,
        "backend": "gloo",
        "ranks": (0, 1),
        "group": "all",
        "num_bytes": 8,
        "dtype": "int64",
        "device": "cpu",
        "phase": "step",
        "place": place,
    }
    return Collective(**values | options)


def run(*of_ranks: Callable[[Exchange], Any]) -> tuple[dict[int, Any], str]:
    """The results of the ranks, each in a thread, and the hang."""
    here = {}
    threads = []
    for rank, of_rank in enumerate(of_ranks):
        here[rank], there = Pipe()

        def work(of_rank: Callable[[Exchange], Any] = of_rank, there: Any = there) -> None:
            exchange = Exchange(there)
            try:
                result = of_rank(exchange)
            except EndlessWaitError:
                result = "hang"
            exchange.finish({"result": result})

        threads.append(Thread(target=work))
    for thread in threads:
        thread.start()
    exchanges = Exchanges(here)
    results = exchanges.serve()
    for thread in threads:
        thread.join()
    for connection in here.values():
        connection.close()
    return {rank: result and result["result"] for rank, result in results.items()}, exchanges.hang


def test_every_rank_gets_the_payloads_in_the_order_of_the_group() -> None:
    results, hang = run(
        lambda exchange: exchange.meet(call("a.py:1"), "zero"),
        lambda exchange: exchange.meet(call("b.py:1"), "one"),
    )
    assert results == {0: ["zero", "one"], 1: ["zero", "one"]}
    assert hang == ""


def test_a_posted_payload_needs_no_wait_of_its_rank() -> None:
    def late(exchange: Exchange) -> Any:
        first = exchange.post(call("b.py:1"), 1)
        exchange.post(call("b.py:2"), 2)
        return exchange.wait(first)

    results, hang = run(
        lambda exchange: [exchange.meet(call("a.py:1"), 3), exchange.meet(call("a.py:2"), 4)], late
    )
    assert results == {0: [[3, 1], [4, 2]], 1: [3, 1]}
    assert hang == ""


def test_messages_arrive_in_order_whenever_they_are_read() -> None:
    def receive(exchange: Exchange) -> list[Any]:
        first, second = [exchange.receive(call("b.py:1", "recv_", peer=0)) for _ in range(2)]
        later = exchange.wait(second)
        return [exchange.wait(first), later]

    def send(exchange: Exchange) -> None:
        exchange.post(call("a.py:1", "send", peer=1), "first")
        exchange.post(call("a.py:2", "send", peer=1), "second")

    results, hang = run(send, receive)
    assert results[1] == ["first", "second"]
    assert hang == ""


def test_a_rank_that_never_comes_is_a_hang_with_the_place_of_the_other() -> None:
    results, hang = run(
        lambda exchange: exchange.meet(call("a.py:7"), None),
        lambda exchange: None,
    )
    assert results[0] == "hang"
    assert hang == (
        "rank 0 waits in allreduce in the group of ranks [0, 1] at a.py:7; rank 1 has ended"
    )


def test_different_operations_are_a_hang() -> None:
    results, hang = run(
        lambda exchange: exchange.meet(call("a.py:7"), None),
        lambda exchange: exchange.meet(call("a.py:9", "broadcast_", root=0), None),
    )
    assert set(results.values()) == {"hang"}
    assert "a.py:7" in hang and "a.py:9" in hang


def test_ranks_in_different_groups_are_a_hang() -> None:
    _, hang = run(
        lambda exchange: exchange.meet(call("a.py:7"), None),
        lambda exchange: exchange.meet(call("a.py:9", group="other"), None),
    )
    assert "a.py:7" in hang and "a.py:9" in hang


def test_a_message_that_is_never_sent_is_a_hang() -> None:
    _, hang = run(
        lambda exchange: exchange.wait(exchange.receive(call("a.py:3", "recv_", peer=1))),
        lambda exchange: None,
    )
    assert hang == "rank 0 waits in recv from rank 1 at a.py:3; rank 1 has ended"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_has_no_result(rank: int) -> None:
    here, there = Pipe()
    there.close()
    assert Exchanges({rank: here}).serve() == {rank: None}
