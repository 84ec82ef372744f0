"""Checks that need all ranks: equality between nodes, and the network between them."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp
from typing import TYPE_CHECKING, Any

from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.layout import layout_of
from pacs_megatron.errors import PacsError
from pacs_megatron.runtime.environment import find_rank, installed
from pacs_megatron.runtime.files import existing_parent
from pacs_megatron.workbench.plan import constants
from pacs_megatron.workbench.preflight.check import Check, judged
from pacs_megatron.workbench.preflight.doctor import driver_version
from pacs_megatron.workbench.preflight.run import local_model, run_preflight, stdout_for_the_report

if TYPE_CHECKING:
    import torch

MAX_SKEW_S = 5.0
ALL_REDUCE_BYTES = 64 * 2**20
ALL_REDUCE_TRIES = 5
SLOW_FRAC = 0.25
"""Share of the plan's bandwidth below which the network gets a warning."""
PROBE_S = 10.0
"""Timeout for a new file to appear on other nodes, which a shared file system may delay"""
WEIGHT_SAMPLE_BYTES = 1 << 20
PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "safetensors",
    "pydantic",
    "transformer-engine",
)


def run_everywhere(
    config_path: Path,
    overrides: Sequence[str],
    *,
    cluster: Path | None = None,
    start_servers: bool = True,
) -> list[Check]:
    """Results of all checks on rank 0 or outside a job; only failures on other ranks.

    Collective under torchrun or srun: one rank of each node checks its host, then all ranks
    compare.
    """
    place = find_rank(os.environ)
    checks = []
    if place is None or place.local_rank == 0:
        with stdout_for_the_report():
            checks = run_preflight(
                config_path, overrides, cluster=cluster, start_servers=start_servers
            )
        if place is not None and place.rank:
            checks = [
                check for check in checks if check.level == "fail"
            ]  # rank 0 alone reports the rest
    return checks + run_rank_checks(config_path, overrides)


def run_rank_checks(path: Path, overrides: Sequence[str]) -> list[Check]:
    """Checks over all ranks, on rank 0; empty elsewhere and outside a job.

    Collective under torchrun or srun.
    """
    place = find_rank(os.environ)
    if place is None:
        return []
    try:
        loaded = load_config(path, overrides)
    except PacsError:
        return []  # `run_preflight` reports the reason on every rank
    os.environ.update(place.variables())
    from pacs_megatron.parallel import groups

    try:
        rank = groups.initialize(
            layout_of(loaded.config, place.world_size), seed=0, control_timeout_s=120.0
        )
    except PacsError as error:
        return [Check("fail", "parallel", str(error))] if place.rank == 0 else []
    try:
        checks = [
            *_equal(loaded, rank),
            *_shared_folder(loaded, rank),
            *_skew(rank),
            *_all_reduce(loaded, rank),
        ]
    finally:
        groups.shutdown()
    return checks if rank.rank == 0 else []


_FIXES = {
    "model.path": "put it on a file system that all nodes share, or run `fetch` on each",
    "GPUs": "request nodes of one kind (cluster file: constraint), with one driver version",
}


def _gather(value: Any, rank: Any) -> list[Any] | None:
    from pacs_megatron.parallel.transfer import gather_json

    return gather_json(value, group=rank.control)


def _equal(loaded: LoadedConfig, rank: Any) -> list[Check]:
    """On rank 0: compares configuration, software, GPUs, model and tokenizer of all ranks."""
    values = {
        "configuration": loaded.to_yaml(),
        "versions": " ".join(f"{name}={installed(name)}" for name in PACKAGES),
        "GPUs": _gpu(rank),
        "model.path": _model_digest(loaded.config.model.path),
    }
    everywhere = _gather(values, rank) or []
    checks = []
    for key, value in values.items() if everywhere else ():
        different = [index for index, other in enumerate(everywhere) if other[key] != value]
        text = (
            f"differs on ranks {different[:8]} from rank 0"
            if different
            else f"equal on {len(everywhere)} ranks"
        )
        fix = _FIXES.get(key, "use one environment and one file system everywhere")
        checks.append(judged(key, not different, text, fix))
    return checks


def _gpu(rank: Any) -> str:
    if rank.device.type != "cuda":
        return "none"
    import torch

    props = torch.cuda.get_device_properties(rank.device)
    return f"{props.name} {props.total_memory} {torch.version.cuda} {torch.cuda.nccl.version()} {driver_version()}"  # type: ignore[no-untyped-call]


def _model_digest(path: str) -> str:
    """Digest of the small files, and of name, size, header and both ends of weight files; takes
    about a second.
    """
    try:
        folder = local_model(path)
    except PacsError as error:
        return f"missing {error}"
    parts = []
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        size = file.stat().st_size
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            digest.update(stream.read(WEIGHT_SAMPLE_BYTES))
            if file.suffix != ".safetensors":  # a tokenizer or a configuration: a few MB at most
                digest.update(stream.read())
            elif size > WEIGHT_SAMPLE_BYTES:
                stream.seek(max(WEIGHT_SAMPLE_BYTES, size - WEIGHT_SAMPLE_BYTES))
                digest.update(stream.read())
        parts.append(f"{file.name}:{size}:{digest.hexdigest()}")
    return "\n".join(parts)


def _shared_folder(loaded: LoadedConfig, rank: Any) -> list[Check]:
    """Checks that run.dir is the same folder on every node: a file that rank 0 writes must appear
    on all ranks.
    """
    from pacs_megatron.parallel.transfer import broadcast_json

    folder = existing_parent(Path(loaded.config.run.dir))
    probe = None
    if rank.rank == 0:
        with suppress(OSError):  # rank 0's check of the folder reports the reason
            descriptor, probe = mkstemp(dir=folder, prefix=".pacs-preflight-")
            os.close(descriptor)
    probe = broadcast_json(probe, src=0, group=rank.control)
    if probe is None:
        return []
    found = _gather(_appears(folder / Path(probe).name), rank)
    if found is None:
        return []
    Path(probe).unlink()
    blind = [index for index, seen in enumerate(found) if not seen]
    text = (
        f"ranks {blind[:8]} do not see a file that rank 0 wrote"
        if blind
        else f"the same on {len(found)} ranks"
    )
    fix = "choose a folder on a file system that all nodes share"
    return [judged("run.dir", not blind, f"{folder}: {text}", fix)]


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + PROBE_S
    while time.monotonic() < deadline:
        if path.name in os.listdir(
            path.parent
        ):  # a listing refreshes a network file system's cache; `stat` may not
            return True
        time.sleep(0.2)
    return False


def _skew(rank: Any) -> list[Check]:
    import torch.distributed as dist

    dist.barrier(group=rank.control)
    times = _gather(time.time(), rank) or [0.0]
    skew = max(times) - min(times)
    fix = "synchronise clocks (chrony): logs and time limits disagree"
    return [judged("clocks", skew < MAX_SKEW_S, f"{skew:.2f} s apart", fix, "warn")]


def _all_reduce(loaded: LoadedConfig, rank: Any) -> list[Check]:
    """Result and bandwidth of a sum over all ranks, over NCCL on GPUs and gloo on CPU."""
    import torch
    import torch.distributed as dist

    world = rank.layout.world_size
    if world == 1:
        return []
    tensor = torch.ones(ALL_REDUCE_BYTES // 4, device=rank.device)
    dist.all_reduce(tensor)
    if not bool((tensor == world).all()):
        return [
            Check(
                "fail",
                "network",
                "an all-reduce gives a wrong sum",
                "check NCCL_* settings and the fabric",
            )
        ]
    seconds = []
    for _ in range(ALL_REDUCE_TRIES):
        start = _now(tensor)
        dist.all_reduce(tensor)
        seconds.append(_now(tensor) - start)
    slowest = max(_gather(min(seconds), rank) or [math.inf])
    rate = 2 * (world - 1) / world * ALL_REDUCE_BYTES / slowest / 1e9
    expected = 0.0
    resources = loaded.config.resources
    if tensor.is_cuda and resources.gpu is not None:
        within = constants.GPUS[resources.gpu].nvlink_gb_s
        expected = within if resources.nodes == 1 else constants.NETWORK_GB_S.value
    text = f"all-reduce over {world} ranks: {rate:.1f} GB/s bus bandwidth ({dist.get_backend()})"
    text += f", `plan` assumes {expected:.0f}" if expected else ""
    fix = "check the transport with NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GPUDirect"
    return [judged("network", rate >= SLOW_FRAC * expected, text, fix, "warn")]


def _now(tensor: torch.Tensor) -> float:
    import torch

    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
