"""Seconds by phase, and the hook that learns of phases."""

from collections.abc import Iterator

import pytest

from pacs_megatron.observability.spans import Timer


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    return Clock()


def test_spans_add_up_nest_and_leave_the_rest_to_step(clock: Clock) -> None:
    timer = Timer(clock=clock)
    with timer.span("rollout"):
        clock.now += 2.0
    clock.now += 0.5
    for _ in range(2):
        with timer.span("update"):
            clock.now += 1.0
            with timer.span("forward"):
                clock.now += 0.25
    assert timer.take() == {
        "time/rollout_s": 2.0,
        "time/step_s": 5.0,
        "time/update/forward_s": 0.5,
        "time/update_s": 2.5,
    }
    clock.now += 1.0
    assert timer.take() == {"time/step_s": 1.0}


def test_a_failing_span_is_timed_and_closed(clock: Clock) -> None:
    timer = Timer(clock=clock)
    with pytest.raises(KeyError), timer.span("update"):
        clock.now += 3.0
        raise KeyError
    assert timer.phase == ()
    assert timer.take()["time/update_s"] == 3.0


def test_hooks_see_every_change(clock: Clock) -> None:
    timer = Timer(clock=clock)
    seen: list[tuple[str, ...]] = []
    timer.on_change(seen.append)
    with timer.span("update"), timer.span("forward"):
        assert timer.phase == ("update", "forward")
    assert seen == [("update",), ("update", "forward"), ("update",), ()]
