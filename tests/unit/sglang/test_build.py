"""Errors while the engine of a run opens leave no managed server running."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.config.rollout_options import SglangRollout, SglangServers, SglangSync
from pacs_megatron.config.schema import ModelOptions, SamplingOptions
from pacs_megatron.errors import ConfigError
from pacs_megatron.sglang import build
from tests.support.tiny_families import make_family


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


@pytest.mark.parametrize(
    ("case", "layers", "interval", "advice"),
    [
        ("qwen3_5", "da", None, "set it to 2"),
        ("qwen3_5", "dda", 2, "set it to 3"),
        ("qwen3_next", "ddad", 3, None),
        ("qwen3_next", "add", 3, "no value gives .* use rollout.engine=embedded"),
        ("qwen3_5_moe", "dad", 2, None),
    ],
)
def test_a_hybrid_whose_layers_sglang_would_not_find_is_rejected(
    tmp_path: Path, case: str, layers: str, interval: int | None, advice: str | None
) -> None:
    """`d` is a layer with a delta net, `a` one with attention."""
    types = ["linear_attention" if kind == "d" else "full_attention" for kind in layers]
    model = make_family(tmp_path, case, num_hidden_layers=len(layers), layer_types=types)
    file = model / "config.json"
    content = json.loads(file.read_text()) | {"full_attention_interval": interval}
    file.write_text(json.dumps(content))
    options = SglangRollout(
        engine="sglang",
        sampling=SamplingOptions(max_response_tokens=1),
        sync=SglangSync(transport="disk"),
        servers=SglangServers(python=(sys.executable,), device="cpu"),
    )
    if advice is None:
        assert len(build.server_specs(options, ModelOptions(path=str(model)), tmp_path)) == 1
        return
    with pytest.raises(ConfigError, match=f"full_attention_interval={interval}, .*; {advice}"):
        build.server_specs(options, ModelOptions(path=str(model)), tmp_path)
