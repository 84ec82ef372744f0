"""metrics.jsonl: bytes, denominators, torn lines, cutting back to a checkpoint."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pacs_megatron.errors import DataError, NonFiniteError
from pacs_megatron.observability.metrics import (
    METRICS_FILE,
    MetricSum,
    MetricSums,
    MetricsWriter,
    read_metrics,
    truncate_metrics,
)
from pacs_megatron.runtime.files import PARTIAL_SUFFIX
from tests.support.metrics import reproducible_bytes, strip_times


def write(run_dir: Path, *rows: dict[str, object]) -> Path:
    with MetricsWriter(run_dir) as writer:
        for row in rows:
            writer.append(row)
    return run_dir / METRICS_FILE


def test_mean_of_merged_sums_is_the_mean_of_all_values() -> None:
    values = [0.0, 1.0, 1.0, 4.0, 10.0]
    left = MetricSum(sum(values[:1]), 1)
    right = MetricSum(sum(values[1:]), 4)
    assert (left + right).mean == np.mean(values)
    assert MetricSum(0.0, 0).mean is None


def test_sums_weight_updates_by_their_samples_and_keep_extremes() -> None:
    sums = MetricSums()
    sums.add_means(
        {"loss": 1.0, "pacs/score_drift_max": 0.1, "len_min": 7.0, "pacs/psi_mean_pos": None}, 3
    )
    sums.add_means(
        {"loss": 2.0, "pacs/score_drift_max": 0.3, "len_min": 5.0, "pacs/psi_mean_pos": 0.5}, 1
    )
    assert sums.values() == {
        "loss": pytest.approx(1.25),
        "pacs/psi_mean_pos": 0.5,
        "pacs/score_drift_max": 0.3,
        "len_min": 5.0,
    }


def test_empty_sums_are_none_and_nan_extremes_are_kept_in_any_order() -> None:
    sums = MetricSums()
    sums.add_means({"x": None}, 4)
    assert sums.values() == {"x": None}
    for order in ([1.0, math.nan], [math.nan, 1.0]):
        extremes = MetricSums()
        for value in order:
            extremes.add_means({"d_max": value}, 1)
        assert math.isnan(extremes.values()["d_max"] or 0.0)


def test_row_has_step_first_then_sorted_keys_and_round_trips(tmp_path: Path) -> None:
    loss = 0.1 + 0.2
    path = write(
        tmp_path,
        {"b": loss, "step": np.int64(1), "a": np.float32(0.5), "n": np.int32(3), "none": None},
    )
    assert (
        path.read_bytes()
        == b'{"step": 1, "a": 0.5, "b": 0.30000000000000004, "n": 3, "none": null}\n'
    )
    assert read_metrics(tmp_path)[0]["b"] == loss


def test_row_does_not_depend_on_the_key_order_of_the_caller(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"step": 1, "x": 1.0, "y": 2.0})
    two = write(tmp_path / "two", {"y": 2.0, "x": 1.0, "step": 1})
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_non_finite_value_is_rejected_by_name_and_writes_nothing(
    tmp_path: Path, bad: float
) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.append({"step": 1, "ok": 1.0})
        with pytest.raises(NonFiniteError, match=r"optimizer/grad_norm of step 2"):
            writer.append({"step": 2, "ok": 1.0, "optimizer/grad_norm": bad})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize("bad", ["0.5", True, [1.0]])
def test_value_that_is_not_a_number_is_rejected(tmp_path: Path, bad: object) -> None:
    with MetricsWriter(tmp_path) as writer, pytest.raises(TypeError, match="metric x"):
        writer.append({"step": 1, "x": bad})


def test_steps_must_increase_across_restarts_too(tmp_path: Path) -> None:
    write(tmp_path, {"step": 0}, {"step": 3})
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="truncate_after"):
        writer.append({"step": 3})


def test_last_line_cut_at_every_byte_is_ignored(tmp_path: Path) -> None:
    path = write(tmp_path, {"step": 1, "x": 0.25}, {"step": 2, "x": 0.5})
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        assert [row["step"] for row in read_metrics(path)] == [1]
        write(tmp_path, {"step": 2, "x": 0.5})
        assert path.read_bytes() == whole


def test_truncate_keeps_the_bytes_of_earlier_rows(tmp_path: Path) -> None:
    path = write(tmp_path, *({"step": step, "x": step / 3} for step in range(6)))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + b'{"step": 6, "x"')
    assert truncate_metrics(tmp_path, 3) == 2
    assert path.read_bytes() == b"".join(lines[:4])
    assert truncate_metrics(tmp_path, 3) == 0
    assert truncate_metrics(tmp_path, -1) == 4
    assert path.read_bytes() == b""


def test_truncate_removes_an_incomplete_last_line_without_removing_rows(tmp_path: Path) -> None:
    path = write(tmp_path, {"step": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"st')
    truncate_metrics(tmp_path, 1)
    assert path.read_bytes() == whole


def test_failed_truncate_leaves_the_old_file_unchanged(tmp_path: Path) -> None:
    path = write(tmp_path, {"step": 1}, {"step": 2})
    whole = path.read_bytes()
    (tmp_path / (METRICS_FILE + PARTIAL_SUFFIX)).mkdir()  # writing the new file fails
    with pytest.raises(IsADirectoryError):
        truncate_metrics(tmp_path, 1)
    assert path.read_bytes() == whole


def test_truncate_without_a_file_and_with_missing_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert truncate_metrics(tmp_path, 5) == 0
    write(tmp_path, {"step": 1})
    truncate_metrics(tmp_path, 5)
    assert "ends at step 1, before the checkpoint's step 5" in caplog.text


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"step": 1}\nnot json\n', ":2: malformed JSON"),
        (b'{"step": 1}\n[1]\n', ":2: expected a JSON object, got an array"),
        (b'{"step": 2}\n{"step": 2}\n', ":2: expected an int step after 2, got 2"),
        (b'{"x": 2}\n', ":1: expected an int step"),
        (b'\xff\xfe{"step": 1}\n', ":1: byte 0 is not UTF-8"),
    ],
)
def test_malformed_line_is_reported(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / METRICS_FILE
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_metrics(path)
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)
    assert path.read_bytes() == content


def test_times_are_stripped_and_nothing_else(tmp_path: Path) -> None:
    row = {
        "step": 1,
        "time/step_s": 1.5,
        "tokens_per_s": 10.0,
        "memory/peak_bytes": 5,
        "pacs/x": 1.0,
        "timely": 2,
    }
    assert strip_times(row) == {"step": 1, "pacs/x": 1.0, "timely": 2}
    one = write(tmp_path / "one", row)
    two = write(tmp_path / "two", {**row, "time/step_s": 9.0, "tokens_per_s": 1.0})
    assert one.read_bytes() != two.read_bytes()
    assert reproducible_bytes(one) == reproducible_bytes(two)
    assert json.loads(reproducible_bytes(one)) == {"step": 1, "pacs/x": 1.0, "timely": 2}
    three = write(tmp_path / "three", {**row, "pacs/x": np.nextafter(1.0, 2.0)})
    assert reproducible_bytes(one) != reproducible_bytes(three)
