"""Differences between the collectives of ranks, each of a kind that hangs on GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacs_megatron.workbench.trace.collectives import Collective
from pacs_megatron.workbench.trace.compare import RankCalls, differences


def call(place: str, operation: str = "allreduce_", num_bytes: int = 8) -> Collective:
    return Collective(
        operation=operation,
        backend="nccl",
        ranks=(0, 1),
        group="tp",
        num_bytes=num_bytes,
        dtype="float32",
        device="cuda",
        phase="update",
        place=place,
    )


def message(operation: str, peer: int, num_bytes: int = 8) -> Collective:
    return replace(call(f"{operation}.py:1", operation, num_bytes), peer=peer, group="pp")


def compared(*calls: list[Collective], ended: tuple[bool, ...] = (True, True)) -> list[str]:
    ranks = []
    for rank, of_rank in enumerate(calls):
        ranks.append(RankCalls(rank=rank, calls=of_rank, has_ended=ended[rank]))
    return differences(ranks)


def test_equal_calls_from_different_places_have_no_difference() -> None:
    assert compared([call("a.py:1"), call("a.py:2")], [call("b.py:1"), call("b.py:2")]) == []


def test_the_first_different_call_is_located() -> None:
    lines = compared(
        [call("a.py:1"), call("a.py:2"), call("a.py:3", "broadcast_")],
        [call("a.py:1"), call("a.py:3", "broadcast_")],
    )
    assert lines == [
        "group of ranks [0, 1]: call 2: rank 0 allreduce of 8 bytes float32 at a.py:2 (update); "
        "rank 1 broadcast of 8 bytes float32 at a.py:3 (update)"
    ]


@pytest.mark.parametrize(
    "other", [call("a.py:1", num_bytes=16), replace(call("a.py:1"), dtype="bfloat16")]
)
def test_size_and_type_are_compared(other: Collective) -> None:
    assert len(compared([call("a.py:1")], [other])) == 1


def test_sizes_of_an_all_to_all_may_differ() -> None:
    first = call("a.py:1", "alltoall_base_", 8)
    assert compared([first], [replace(first, num_bytes=24)]) == []


def test_a_missing_call_counts_only_on_a_rank_that_ended() -> None:
    (line,) = compared([call("a.py:1")], [])
    assert "rank 1 nothing more" in line
    assert compared([call("a.py:1")], [], ended=(True, False)) == []


def test_groups_of_the_same_ranks_are_independent() -> None:
    other = replace(call("a.py:2", "broadcast_"), group="dp")
    assert compared([call("a.py:1"), other], [other, call("a.py:1")]) == []


def test_every_send_needs_its_receive() -> None:
    pair = ([message("send", 1)], [message("recv_", 0)])
    assert compared(*pair) == []
    (line,) = compared(pair[0], [])
    assert line.startswith("from rank 0 to rank 1: call 1: rank 0 send of 8 bytes")
    assert len(compared(pair[0], [message("recv_", 0, 16)])) == 1
