"""Errors while the engine of a run opens leave no managed server running."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.config.rollout_options import SglangRollout, SglangServers, SglangSync
from pacs_megatron.config.schema import ModelOptions, SamplingOptions
from pacs_megatron.errors import ConfigError
from pacs_megatron.sglang import build


class RecordedServer:
    """In place of a managed server: only whether it was closed."""

    api = object()

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RecordedServer]:
    """The servers that were started."""
    servers: list[RecordedServer] = []

    def start(specs: list[Any], *_: Any) -> list[RecordedServer]:
        servers.extend(RecordedServer() for _ in specs)
        return servers

    monkeypatch.setattr(build, "start_servers", start)
    return servers


def open_engine(folder: Path, model: Path, transport: str, **servers: Any) -> None:
    options = SglangRollout(
        engine="sglang",
        sampling=SamplingOptions(max_response_tokens=1),
        sync=SglangSync(transport=transport),
        servers=SglangServers(python=(sys.executable,), count=2, **servers),
    )
    build.open_engine(options, ModelOptions(path=str(model)), folder)


def test_a_gpu_without_a_rank_is_an_error_before_a_server_starts(
    started: list[RecordedServer],
    tmp_path: Path,
    tiny_qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="the trainer does not use GPU 7"):
        open_engine(tmp_path, tiny_qwen3, "ipc", device="cuda", visible_devices=("0", "7"))
    assert started == []


def test_an_error_after_the_start_closes_all_servers(
    started: list[RecordedServer],
    tmp_path: Path,
    tiny_qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConfigError("no engine")

    monkeypatch.setattr(build, "SglangEngine", fail)
    with pytest.raises(ConfigError, match="no engine"):
        open_engine(tmp_path, tiny_qwen3, "disk", device="cpu")
    assert [server.is_closed for server in started] == [True, True]
