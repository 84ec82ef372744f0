"""Checks that need all ranks: equality between nodes, and the network between them."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp
from typing import TYPE_CHECKING, Any

from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.layout import layout_of
from pacs_megatron.errors import PacsError
from pacs_megatron.runtime.environment import find_rank, installed
from pacs_megatron.runtime.files import existing_parent
from pacs_megatron.runtime.gpus import GPUS
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
_MAX_LISTED_RANKS = 8
_FIXES = {
    "model.path": "put it on a file system that all nodes share, or run `fetch` on each",
    "GPUs": "request nodes of one kind (cluster file: constraint), with one driver version",
}


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
    # Rank 0 alone reports the lines that are no failures.
    if place is not None and place.rank:
        checks = [check for check in checks if check.level == "fail"]
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

    layout = layout_of(loaded.config, place.world_size)
    try:
        rank = groups.initialize(layout, seed=0, control_timeout_s=120.0)
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


def _gather(value: Any, rank: Any) -> list[Any] | None:
    """The values of all ranks in their order, on rank 0; None elsewhere. Collective."""
    from pacs_megatron.parallel.transfer import gather_json

    return gather_json(value, group=rank.control)


# ---------------------------------------------------------------------------------------- equality
def _equal(loaded: LoadedConfig, rank: Any) -> list[Check]:
    """On rank 0: compares configuration, software, GPUs, model and tokenizer of all ranks."""
    values = {
        "configuration": loaded.to_yaml(),
        "versions": " ".join(f"{name}={installed(name)}" for name in PACKAGES),
        "GPUs": _gpu(rank),
        "model.path": _model_digest(loaded.config.model.path),
    }
    values_of_ranks = _gather(values, rank)
    if values_of_ranks is None:
        return []
    return [_equal_value(key, values_of_ranks) for key in values]


def _equal_value(key: str, values_of_ranks: Sequence[Mapping[str, str]]) -> Check:
    expected = values_of_ranks[0][key]
    ranks = [index for index, values in enumerate(values_of_ranks) if values[key] != expected]
    message = f"equal on {len(values_of_ranks)} ranks"
    if ranks:
        message = f"differs on ranks {ranks[:_MAX_LISTED_RANKS]} from rank 0"
    fix = _FIXES.get(key, "use one environment and one file system everywhere")
    return judged(key, not ranks, message, fix)


def _gpu(rank: Any) -> str:
    """Name, memory, CUDA, NCCL and driver of this rank's GPU."""
    if rank.device.type != "cuda":
        return "none"
    import torch

    properties = torch.cuda.get_device_properties(rank.device)
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return (
        f"{properties.name} {properties.total_memory} {torch.version.cuda} {nccl} "
        f"{driver_version()}"
    )


def _model_digest(path: str) -> str:
    """Digest of the small files, and of name, size, header and both ends of weight files; takes
    about a second.
    """
    try:
        folder = local_model(path)
    except PacsError as error:
        return f"missing {error}"
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return "\n".join(_file_digest(file) for file in files)


def _file_digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        digest.update(stream.read(WEIGHT_SAMPLE_BYTES))
        if file.suffix != ".safetensors":  # a tokenizer or a configuration: a few MB at most
            digest.update(stream.read())
        elif size > WEIGHT_SAMPLE_BYTES:
            stream.seek(max(WEIGHT_SAMPLE_BYTES, size - WEIGHT_SAMPLE_BYTES))
            digest.update(stream.read())
    return f"{file.name}:{size}:{digest.hexdigest()}"


# ----------------------------------------------------------------------------------------- network
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
    is_seen_by_ranks = _gather(_appears(folder / Path(probe).name), rank)
    if is_seen_by_ranks is None:
        return []
    Path(probe).unlink()

    blind = [index for index, is_seen in enumerate(is_seen_by_ranks) if not is_seen]
    message = f"{folder}: the same on {len(is_seen_by_ranks)} ranks"
    if blind:
        ranks = blind[:_MAX_LISTED_RANKS]
        message = f"{folder}: ranks {ranks} do not see a file that rank 0 wrote"
    fix = "choose a folder on a file system that all nodes share"
    return [judged("run.dir", not blind, message, fix)]


def _appears(path: Path) -> bool:
    """Whether the file exists within PROBE_S seconds."""
    deadline = time.monotonic() + PROBE_S
    while time.monotonic() < deadline:
        # A listing refreshes a network file system's cache; `stat` may not.
        if path.name in os.listdir(path.parent):
            return True
        time.sleep(0.2)
    return False


def _skew(rank: Any) -> list[Check]:
    """The largest difference between the clocks of two ranks."""
    import torch.distributed as dist

    dist.barrier(group=rank.control)
    times = _gather(time.time(), rank) or [0.0]
    skew_s = max(times) - min(times)
    fix = "synchronise clocks (chrony): logs and time limits disagree"
    return [judged("clocks", skew_s < MAX_SKEW_S, f"{skew_s:.2f} s apart", fix, "warn")]


def _all_reduce(loaded: LoadedConfig, rank: Any) -> list[Check]:
    """Result and bandwidth of a sum over all ranks, over NCCL on GPUs and gloo on CPU."""
    import torch
    import torch.distributed as dist

    world_size = rank.layout.world_size
    if world_size == 1:
        return []
    tensor = torch.ones(ALL_REDUCE_BYTES // 4, device=rank.device)
    dist.all_reduce(tensor)
    if not bool((tensor == world_size).all()):
        message = "an all-reduce gives a wrong sum"
        return [Check("fail", "network", message, "check NCCL_* settings and the fabric")]

    seconds = []
    for _ in range(ALL_REDUCE_TRIES):
        start = _now(tensor)
        dist.all_reduce(tensor)
        seconds.append(_now(tensor) - start)
    slowest_s = max(_gather(min(seconds), rank) or [math.inf])

    # Bus bandwidth as nccl-tests defines it: a ring moves 2 (n - 1) / n of the bytes over a link.
    gb_s = 2 * (world_size - 1) / world_size * ALL_REDUCE_BYTES / slowest_s / 1e9
    expected_gb_s = 0.0
    resources = loaded.config.resources
    if tensor.is_cuda and resources.gpu is not None:
        nvlink_gb_s = GPUS[resources.gpu].nvlink_gb_s
        expected_gb_s = nvlink_gb_s if resources.nodes == 1 else constants.NETWORK_GB_S.value

    message = (
        f"all-reduce over {world_size} ranks: {gb_s:.1f} GB/s bus bandwidth ({dist.get_backend()})"
    )
    if expected_gb_s:
        message += f", `plan` assumes {expected_gb_s:.0f}"
    is_fast = gb_s >= SLOW_FRAC * expected_gb_s
    fix = "check the transport with NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GPUDirect"
    return [judged("network", is_fast, message, fix, "warn")]


def _now(tensor: torch.Tensor) -> float:
    """Seconds of a clock, after all work on the tensor's device."""
    import torch

    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
