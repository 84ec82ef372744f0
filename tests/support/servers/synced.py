"""Weights of a few tensors, and an update that sends them to servers."""

from __future__ import annotations

from typing import Any

import torch

from pacs_megatron.config.rollout_options import SglangRollout, SglangSync
from pacs_megatron.contracts import SamplingOptions
from pacs_megatron.sglang.api import SglangApi
from pacs_megatron.sglang.weights.checksums import ModelDims
from pacs_megatron.sglang.weights.server_sync import ServerSync
from pacs_megatron.sglang.weights.transports import (
    Transport,
)
from tests.support.servers.weight_server import InMemory, WeightServer


def weights(seed: int, num: int = 12) -> dict[str, torch.Tensor]:
    """Larger than a bucket of 1 kB together, and one that is larger by itself."""
    generator = torch.Generator().manual_seed(seed)
    named = {
        f"model.layers.{i}.norm.weight": torch.randn(8, 8, generator=generator) for i in range(num)
    }
    return named | {"model.embed_tokens.weight": torch.randn(64, 32, generator=generator)}


def bf16(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in named.items()}


def made(
    servers: list[WeightServer],
    transport: Transport | None = None,
    *,
    dead_after_s: float = 2.0,
    **changes: Any,
) -> ServerSync:
    sync_options = {
        "transport": "ipc",
        "pause": "retract",
        "verify": "full",
        "timeout_s": 5.0,
        **changes,
    }
    options = SglangRollout(
        engine="sglang",
        sampling=SamplingOptions(max_response_tokens=1),
        sync=SglangSync(**sync_options),
        urls=("http://127.0.0.1:1",),
        dead_after_s=dead_after_s,
    )
    by_url = {server.url: server for server in servers}
    transport = InMemory(by_url) if transport is None else transport
    sync = ServerSync(options, ModelDims(num_kv_heads=2), transport, 1024)
    sync.set_targets(
        [SglangApi(url=server.url, api_key=server.api_key, timeout_s=5.0) for server in servers]
    )
    return sync
