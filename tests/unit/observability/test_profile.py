"""Profiles of the listed steps: files, ranges, and nothing in other steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pacs_megatron.config.schema import ProfileOptions
from pacs_megatron.observability import profile
from pacs_megatron.observability.profile import StepProfiler, device_span
from pacs_megatron.observability.spans import Timer

CPU = torch.device("cpu")


def profiler(folder: Path, rank: int = 0, **options: Any) -> tuple[StepProfiler, Timer]:
    timer = Timer()
    made = StepProfiler(ProfileOptions(steps=(2, 3), **options), folder, rank, CPU)
    made.watch(timer)
    return made, timer


def run_steps(made: StepProfiler, timer: Timer, last: int = 4) -> None:
    for step in range(1, last + 1):
        with made.step(step):
            with timer.span("rollout"):
                torch.ones(8).sum()
            with timer.span("update"), timer.span("forward_backward"):
                torch.ones(4, 4) @ torch.ones(4, 4)


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


def test_a_trace_has_the_phases_of_its_step(tmp_path: Path) -> None:
    run_steps(*profiler(tmp_path))
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == ["rank0.2.pt.trace.json.gz", "rank0.3.pt.trace.json.gz"]
    of_step = events(tmp_path / "profile" / files[0])
    ranges = {e["name"]: e for e in of_step if e.get("cat") == "user_annotation"}
    assert {"step 2", "rollout", "update", "forward_backward"} <= ranges.keys()

    def is_inside(inner: str, outer: str) -> bool:
        start = ranges[outer]["ts"]
        end = start + ranges[outer]["dur"]
        return start <= ranges[inner]["ts"] and ranges[inner]["ts"] + ranges[inner]["dur"] <= end

    assert is_inside("update", "step 2") and is_inside("forward_backward", "update")
    assert not is_inside("rollout", "update")
    products = [e for e in of_step if e["name"] == "aten::mm"]
    assert len(products) == 1 and "step 3" not in ranges


def test_other_ranks_and_runs_record_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "recorder_of", None)  # to call it is an error
    run_steps(*profiler(tmp_path, rank=1))
    timer = Timer()
    off = StepProfiler(None, tmp_path, 0, CPU)
    off.watch(timer)
    run_steps(off, timer)
    assert timer._hooks == [] and not (tmp_path / "profile").exists()


def test_a_step_that_raises_leaves_no_file_and_the_next_one_does(tmp_path: Path) -> None:
    made, timer = profiler(tmp_path)
    with pytest.raises(KeyError), made.step(2), timer.span("update"):
        raise KeyError
    with made.step(3), timer.span("update"):
        pass
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank0.3.pt.trace.json.gz"]


def test_a_profile_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("a file in the place of the folder")
    run_steps(*profiler(tmp_path))
    assert "step 2 has no profile of rank 0" in caplog.text


class Cuda:
    """torch.cuda with a record of the calls of profilers."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.nvtx = SimpleNamespace(range_push=self._called, range_pop=lambda: self._called("pop"))
        self.memory = SimpleNamespace(
            _record_memory_history=self._history, _dump_snapshot=self._snapshot
        )

    def _called(self, name: str) -> None:
        self.calls.append(name)

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def cudart(self) -> Any:
        return SimpleNamespace(
            cudaProfilerStart=lambda: self._called("start"),
            cudaProfilerStop=lambda: self._called("stop"),
        )

    def _history(
        self, enabled: str | None = "all", stacks: str = "all", max_entries: int = 0
    ) -> None:
        self.calls.append(f"history {enabled}")

    def _snapshot(self, path: str) -> None:
        Path(path).write_text("snapshot")


def test_nsys_gets_nested_ranges_inside_the_capture_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    made, timer = profiler(tmp_path, kind="nsys")
    run_steps(made, timer, last=2)
    assert cuda.calls == [
        *("synchronize", "start", "step 2", "rollout", "pop"),
        *("update", "forward_backward", "pop", "pop", "pop", "synchronize", "stop"),
    ]


def test_a_snapshot_of_memory_ends_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    made, timer = profiler(tmp_path, kind="memory")
    run_steps(made, timer, last=2)
    assert cuda.calls == ["history all", "history None"]
    [file] = (tmp_path / "profile").iterdir()
    assert file.name == "rank0.2.memory.pickle" and file.read_text() == "snapshot"


def test_spans_of_a_gpu_wait_for_its_stream_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: calls.append("drained"))
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(current_stream=lambda _device: stream))
    timer = Timer()
    with device_span(timer, torch.device("cuda", 0))("forward_backward"):
        calls.append("work")
    assert calls == ["drained", "work", "drained"]
    with device_span(timer, CPU)("forward_backward"):
        assert timer.phase == ("forward_backward",)
    assert calls == ["drained", "work", "drained"]
