"""Who waits for whom, from the seconds of every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.errors import DataError
from pacs_megatron.observability.rank_times import (
    append_rank_times,
    read_rank_times,
    span_seconds,
    truncate_rank_times,
    waits_of,
)
from pacs_megatron.observability.report import write_report


def times(update: float, reduce: float, generate: float, rollout: float = 10.0) -> dict[str, float]:
    """One rank's seconds in a step."""
    return {
        "rollout": rollout,
        "rollout/generate": generate,
        "update": update,
        "update/forward_backward": update - 0.5,
        "update/forward_backward/reduce": reduce,
        "step": rollout + update,
    }


def test_the_ranks_wait_for_the_one_that_works_longest() -> None:
    """Rank 1 has more tokens: both ranks are as long in the update, and rank 0 waits in it."""
    rows = [
        {"step": 1, "ranks": [times(6.0, 3.0, 9.5), times(6.0, 1.0, 8.0)]},
        {"step": 2, "ranks": [times(6.0, 2.0, 9.0), times(6.0, 1.0, 9.0)]},
        {"step": 3, "ranks": [times(6.0, 0.5, 9.0), times(6.0, 0.5, 7.0)]},
    ]
    update, rollout = sorted(waits_of(rows), key=lambda wait: wait.phase, reverse=True)
    assert (update.phase, update.slowest, update.seconds) == ("update", 1, 6.0)
    assert update.slowest_frac == pytest.approx(2 / 3)
    assert update.work_s == pytest.approx((5.0 + 5.0 + 5.5) / 3)
    assert update.wait_s == pytest.approx((2.0 + 1.0 + 0.0) / 3)
    assert (rollout.phase, rollout.slowest) == ("rollout", 0)
    assert rollout.work_s == pytest.approx((9.5 + 9.0 + 9.0) / 3)
    assert rollout.wait_s == pytest.approx((1.5 + 0.0 + 2.0) / 3)


def test_without_own_sampling_all_ranks_wait_for_the_servers() -> None:
    rows = [{"step": 1, "ranks": [{"rollout": 7.0, "step": 7.5}, {"rollout": 7.1, "step": 7.5}]}]
    [wait] = waits_of(rows)
    assert (wait.slowest, wait.work_s, wait.wait_s) == (None, 0.0, 7.1)


def test_a_phase_that_a_step_lacks_does_not_count() -> None:
    rows = [
        {"step": 1, "ranks": [{"update": 2.0, "step": 2.0}]},
        {"step": 2, "ranks": [{"update": 4.0, "evaluation": 3.0, "step": 9.0}]},
    ]
    seconds = {wait.phase: wait.seconds for wait in waits_of(rows)}
    assert seconds == {"update": 3.0, "evaluation": 3.0}


def test_rows_of_a_resumed_run_replace_those_after_its_checkpoint(tmp_path: Path) -> None:
    assert read_rank_times(tmp_path) == []
    truncate_rank_times(tmp_path, 3)
    for step in (1, 2, 3):
        append_rank_times(tmp_path, step, [times(step, 0.1, 1.0)])
    path = tmp_path / "profile" / "rank_times.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 4, "ra')  # a kill
    truncate_rank_times(tmp_path, 2)
    append_rank_times(tmp_path, 3, [times(30.0, 0.1, 1.0)])
    rows = read_rank_times(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["ranks"][0]["update"] == 30.0


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1}',
        '{"step": "1", "ranks": [{}]}',
        '{"step": 1, "ranks": [{"a": "b"}]}',
        "[]",
        "x",
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, line: str) -> None:
    append_rank_times(tmp_path, 1, [{"update": 1.0}])
    path = tmp_path / "profile" / "rank_times.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"rank_times\.jsonl:2"):
        read_rank_times(tmp_path)


def test_the_report_has_the_table(tmp_path: Path) -> None:
    append_rank_times(tmp_path, 1, [times(6.0, 3.0, 9.5), times(6.0, 1.0, 8.0)])
    page = write_report(tmp_path).read_text()
    assert "<h2>Ranks</h2>" in page and "Means over 1 steps of 2 ranks" in page
    row = "<td>update</td><td>6</td><td>rank 1 (100 % of the steps)</td><td>5</td><td>2</td>"
    assert row in page
    assert "<h2>Ranks</h2>" not in write_report(tmp_path / "profile").read_text()


def test_paths_of_spans() -> None:
    assert span_seconds({"time/update/reduce_s": 1.5, "time/step_s": 2.0}) == {
        "update/reduce": 1.5,
        "step": 2.0,
    }
