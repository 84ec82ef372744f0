"""Builds the weight sync of a run's configuration."""

import hashlib
from pathlib import Path

import torch

from pacs_megatron.config.rollout_options import SglangRollout
from pacs_megatron.models import ModelSpec
from pacs_megatron.sglang.weights.checksums import ModelDims
from pacs_megatron.sglang.weights.server_sync import ServerSync, SyncSettings
from pacs_megatron.sglang.weights.transports import BroadcastTransport, DiskTransport, IpcTransport, Transport

MIB = 1 << 20


def server_sync(options: SglangRollout, spec: ModelSpec, folder: Path) -> ServerSync:
    """A `WeightReceiver` for the run's servers; call `set_targets` before each push.

    `transport: disk` writes to `folder`, which belongs to this run, or to a subfolder of `sync.folder`. The subfolder's
    name contains a hash of the run's path, so that two runs never read each other's versions.
    """
    sync = options.sync
    settings = SyncSettings(
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype],
        bucket_bytes=sync.bucket_mib * MIB,
        pause=sync.pause,
        verify=sync.verify,
        timeout_s=sync.timeout_s,
        probe_timeout_s=min(options.dead_after_s, sync.timeout_s),
        dims=ModelDims(num_kv_heads=spec.num_kv_heads, num_experts=0 if spec.moe is None else spec.moe.num_experts),
        fp8=sync.quantize == "fp8_blockwise",
    )
    transport: Transport
    if sync.transport == "disk":
        if sync.folder is not None:
            run = folder.absolute().parent
            folder = Path(sync.folder) / f"{run.name}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"
        transport = DiskTransport(folder, sync.timeout_s)
    elif sync.transport == "broadcast":
        transport = BroadcastTransport(sync.host, sync.timeout_s)
    else:
        transport = IpcTransport(sync.timeout_s)
    return ServerSync(transport, settings)
