"""Traces are kept by what changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.errors import ConfigError
from pacs_megatron.workbench.trace import runs
from pacs_megatron.workbench.trace.rank import TraceRequest

CONFIG = Path(__file__).parents[4] / "configs" / "runs" / "pacs-qwen3-14b-2n8g-tp4.yaml"


def test_a_trace_is_kept_until_its_request_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[Any, ...]] = []

    def run(request: TraceRequest) -> dict[str, Any]:
        ran.append((request.rank, request.num_layers, tuple(request.overrides)))
        return {"rank": request.rank}

    monkeypatch.setattr(runs, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(runs, "_run", run)

    def trace(*overrides: str, rank: int = 0) -> list[dict[str, Any]]:
        request = TraceRequest(config=str(CONFIG), overrides=list(overrides), rank=rank)
        return runs.trace_ranks(load_config(CONFIG, overrides), [request])

    assert trace() == trace() == [{"rank": 0}]
    assert len(ran) == 1
    assert trace(rank=4) == [{"rank": 4}]
    trace("batch.tokens_per_microbatch=10240")
    assert len(ran) == 3

    # A file that was cut is made again.
    for path in tmp_path.rglob("*.json"):
        path.write_text("{")
    trace()
    assert len(ran) == 4


def test_a_rank_that_fails_is_one_line() -> None:
    request = TraceRequest(config="no/such.yaml", rank=3)
    with pytest.raises(ConfigError, match=r"the trace of rank 3 failed: .*no/such.yaml"):
        runs._run(request)
