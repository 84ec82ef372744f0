"""The part of `preflight` that needs all ranks: what must be equal on every node, and the network between them."""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.layout import layout_of
from pacs_megatron.errors import PacsError
from pacs_megatron.launch.doctor import installed
from pacs_megatron.launch.environment import find_rank
from pacs_megatron.launch.preflight import Check, local_model

if TYPE_CHECKING:
    import torch

MAX_SKEW_S = 5.0
ALL_REDUCE_BYTES = 64 * 2**20
PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "pydantic", "transformer-engine")


def run_rank_checks(path: Path, overrides: Sequence[str]) -> list[Check]:
    """Checks over all ranks, on rank 0; empty elsewhere and outside a job. Collective under torchrun or srun."""
    place = find_rank(os.environ)
    if place is None:
        return []
    try:
        loaded = load_config(path, overrides)
    except PacsError:
        return []  # the other part says why, on every rank alike
    os.environ.update(place.variables())
    from pacs_megatron.parallel import groups

    layout = layout_of(loaded.config, place.world_size)
    rank = groups.initialize(layout, seed=0, control_timeout_s=120.0)
    try:
        checks = [*_equal(loaded, rank), *_skew(rank), *_all_reduce(rank)]
    finally:
        groups.shutdown()
    return checks if rank.rank == 0 else []


def _equal(loaded: LoadedConfig, rank: Any) -> list[Check]:
    """Configuration, software, model and tokenizer, as hashes gathered from every rank."""
    values = {
        "configuration": loaded.to_yaml(),
        "versions": " ".join(f"{name}={installed(name)}" for name in PACKAGES),
        "model.path": _model_hash(loaded.config.model.path),
    }
    checks = []
    for key, value in values.items():
        digest = struct.unpack("<q", hashlib.sha256(value.encode()).digest()[:8])[0]
        found = _gather(rank, digest)
        different = [index for index, other in enumerate(found) if other != found[0]]
        if different:
            fix = (
                "put it on a file system that all nodes share"
                if key == "model.path"
                else "use one environment everywhere"
            )
            checks.append(Check("fail", key, f"differs on ranks {different[:8]} from rank 0", fix))
        else:
            checks.append(Check("ok", key, f"equal on {len(found)} ranks"))
    return checks


def _model_hash(path: str) -> str:
    """Names, sizes and small files of the model's folder: enough to tell two downloads apart without reading them."""
    try:
        folder = local_model(path)
    except PacsError as error:
        return f"missing {error}"
    parts = []
    for file in sorted(folder.iterdir()):
        if file.is_file():
            parts.append(f"{file.name}:{file.stat().st_size}")
            if file.suffix == ".json":
                parts.append(hashlib.sha256(file.read_bytes()).hexdigest())
    return "\n".join(parts)


def _gather(rank: Any, value: float) -> list[float]:
    import torch
    import torch.distributed as dist

    dtype = torch.int64 if isinstance(value, int) else torch.float64
    mine = torch.tensor([value], dtype=dtype)
    found = [torch.zeros(1, dtype=dtype) for _ in range(rank.layout.world_size)]
    dist.all_gather(found, mine, group=rank.control)
    return [tensor.item() for tensor in found]


def _skew(rank: Any) -> list[Check]:
    import torch.distributed as dist

    dist.barrier(group=rank.control)
    times = _gather(rank, time.time())
    skew = max(times) - min(times)
    level, fix = (
        ("ok", "") if skew < MAX_SKEW_S else ("warn", "synchronise clocks (chrony): logs and time limits disagree")
    )
    return [Check(level, "clocks", f"{skew:.2f} s apart", fix)]  # type: ignore[arg-type]


def _all_reduce(rank: Any) -> list[Check]:
    """A sum over all ranks: right, and how fast. Over NCCL on GPUs, gloo on CPU."""
    import torch
    import torch.distributed as dist

    world = rank.layout.world_size
    if world == 1:
        return []
    tensor = torch.ones(ALL_REDUCE_BYTES // 4, device=rank.device)
    dist.all_reduce(tensor)
    if not bool((tensor == world).all()):
        return [Check("fail", "network", "an all-reduce gives a wrong sum", "check NCCL_* settings and the fabric")]
    start = _now(tensor)
    dist.all_reduce(tensor)
    seconds = _now(tensor) - start
    rate = 2 * (world - 1) / world * ALL_REDUCE_BYTES / seconds / 1e9
    return [
        Check("ok", "network", f"all-reduce over {world} ranks: {rate:.1f} GB/s bus bandwidth ({dist.get_backend()})")
    ]


def _now(tensor: torch.Tensor) -> float:
    import torch

    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
