"""Managed servers with a stand-in program."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tests.support.servers.dummy_server as dummy
from pacs_megatron.config.rollout_options import SglangRollout, SglangServers, SglangSync
from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.contracts import SamplingOptions
from pacs_megatron.sglang import guard as sglang_guard
from pacs_megatron.sglang.server import ManagedServer, ServerSpec

PYTHON = (sys.executable, dummy.__file__)


def spec(folder: Path, *extra: str, name: str = "server0", **servers: Any) -> ServerSpec:
    values = {"python": PYTHON, "device": "cpu", "extra_args": extra, **servers}
    options = SglangRollout(
        engine="sglang",
        sampling=SamplingOptions(max_response_tokens=1),
        sync=SglangSync(transport="disk"),
        servers=SglangServers(**values),
    )
    return ServerSpec(name=name, folder=folder, options=options, model=ModelOptions(path="none"))


def tree(server: ManagedServer) -> list[int]:
    """Guard, server and its children."""
    record = json.loads(server.pid_file.read_text())
    return [record["guard"], *sglang_guard.members(record["server"])]


def options(**changes: object) -> SglangRollout:
    values: dict[str, object] = {
        "engine": "sglang",
        "sampling": SamplingOptions(max_response_tokens=1),
        "sync": SglangSync(transport="disk"),
        "urls": ("http://127.0.0.1:1",),
    }
    return SglangRollout(**(values | changes))  # type: ignore[arg-type]
