"""Profiles on a real GPU: kernels in the trace, NVTX, and the allocator's snapshot."""

from __future__ import annotations

import gzip
import json
import pickle
from itertools import chain
from pathlib import Path

import pytest
import torch

from pacs_megatron.config.schema import ProfileOptions
from pacs_megatron.observability.profile import StepProfiler, device_span
from pacs_megatron.observability.spans import Timer

pytestmark = pytest.mark.gpu


def profiled_step(folder: Path, kind: str) -> None:
    """One profiled step with a product of matrices in `update`."""
    device = torch.device("cuda", torch.cuda.current_device())
    options = ProfileOptions.model_validate({"steps": [1], "kind": kind})
    timer = Timer()
    profiler = StepProfiler(options, folder, 0, device)
    profiler.watch(timer)
    with profiler.step(1), device_span(timer, device)("update"):
        matrix = torch.ones(512, 512, device=device)
        (matrix @ matrix).sum()


def test_a_trace_has_kernels(tmp_path: Path) -> None:
    profiled_step(tmp_path, "torch")
    path = tmp_path / "profile" / "rank0.1.pt.trace.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert {"step 1", "update"} <= {event["name"] for event in events}


def test_a_snapshot_has_the_allocations(tmp_path: Path) -> None:
    profiled_step(tmp_path, "memory")
    path = tmp_path / "profile" / "rank0.1.memory.pickle"
    snapshot = pickle.loads(path.read_bytes())  # noqa: S301  (our own file)
    sizes = {event["size"] for event in chain(*snapshot["device_traces"])}
    assert 512 * 512 * 4 in sizes


def test_a_capture_range_without_nsys_does_nothing(tmp_path: Path) -> None:
    profiled_step(tmp_path, "nsys")
    assert not list((tmp_path / "profile").glob("rank*"))
