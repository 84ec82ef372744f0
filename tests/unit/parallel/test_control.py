"""Values and errors that every rank must have."""

from __future__ import annotations

import time

import pytest

from pacs_megatron.errors import DataError, PacsError, RolloutError
from pacs_megatron.parallel.control import ControlChannel
from tests.support.ranks import rank_of, run_ranks

WORLD = 3


def error_of(
    rank: int, failing: dict[int, PacsError], *, only: int | None = None
) -> tuple[str, str] | int | None:
    """(class, message) of what `run_together` raises, or its result."""

    def action() -> int:
        if rank in failing:
            raise failing[rank]
        return 10 + rank

    try:
        return ControlChannel(rank_of(rank, tp=WORLD)).run_together(action, only=only)
    except PacsError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("failing", "only", "expected"),
    [
        ({}, None, [10, 11, 12]),
        ({}, 1, [None, 11, None]),
        (
            {2: DataError("b|ä\nc")},
            None,
            [("DataError", "b|ä c")] * WORLD,
        ),  # an error is always one line
        ({1: RolloutError("b")}, 1, [("RolloutError", "b")] * WORLD),
        ({1: RolloutError("b")}, 2, [None, None, 12]),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(
    failing: dict[int, PacsError], only: int | None, expected: list[object]
) -> None:
    assert run_ranks(lambda rank, _: error_of(rank, failing, only=only), WORLD) == expected


def test_of_several_errors_all_ranks_raise_the_first() -> None:
    failing: dict[int, PacsError] = {1: DataError("first"), 2: RolloutError("second")}
    assert (
        run_ranks(lambda rank, _: error_of(rank, failing), WORLD)
        == [("DataError", "first")] * WORLD
    )


def test_values_and_decisions_of_rank_0_reach_all() -> None:
    def on_rank(rank: int, _world: int) -> object:
        channel = ControlChannel(rank_of(rank, tp=WORLD))
        beats: list[float] = []
        channel.on_heartbeat = lambda: beats.append(time.monotonic())
        value = channel.broadcast_json({"a": [1, None, "é"]} if rank == 0 else "ignored")
        groups = {"kind": "groups", "n": 1}
        if rank == 0:
            channel.heartbeat()
            channel.send(groups)
            return value, groups, len(beats)
        return value, channel.receive(), len(beats)

    for value, decision, num_beats in run_ranks(on_rank, WORLD):
        assert value == {"a": [1, None, "é"]}
        assert (decision, num_beats) == ({"kind": "groups", "n": 1}, 1)
