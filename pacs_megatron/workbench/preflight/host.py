"""Checks of this host: software, GPUs, folders, free space, ports, network interfaces, cluster
file.
"""

import errno
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from pacs_megatron.config import LoadedConfig
from pacs_megatron.config.cluster import load_cluster
from pacs_megatron.errors import PacsError
from pacs_megatron.runtime.environment import DRIVER_FILES, installed, job_port
from pacs_megatron.runtime.files import GIB, disk_error, existing_parent
from pacs_megatron.workbench.plan import constants, memory, state
from pacs_megatron.workbench.plan.plan import Plan
from pacs_megatron.workbench.preflight import doctor, quota
from pacs_megatron.workbench.preflight.check import Check, Level, attempt, judged

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
IB_DEVICES = Path("/sys/class/infiniband")
FILES_A_CHECKPOINT = 64
"""Files of a checkpoint and its share of logs, in addition to one or two per rank."""
MIN_SCRATCH_BYTES = 1 * GIB
"""Sockets, compiled kernels and caches of a job."""
TINY_SCRATCH_BYTES = 16 * 2**20
"""Below this size even the reward's processes cannot start."""


def check_software(loaded: LoadedConfig) -> Iterator[Check]:
    """The software that `doctor` finds wrong, or one line."""
    rows = [*doctor.python(), *doctor.packages(), doctor.apex()]
    if needs_gpus(loaded):
        rows.append(doctor.transformer_engine())
    broken = [row for row in rows if row.level in ("warn", "fail")]
    names = ("torch", "megatron-core", "transformers", "datasets")
    yield from broken or [
        Check("ok", "software", ", ".join(f"{name} {installed(name)}" for name in names))
    ]
    precision = loaded.config.precision
    if needs_gpus(loaded) and precision.dtype == "bf16" and installed("transformer-engine") is None:
        level: Level = "fail" if precision.fp8 is not None and in_a_job() else "warn"
        key = "precision.fp8" if precision.fp8 is not None else "transformer-engine"
        message = (
            "Transformer Engine is not installed here: no FP8, and bf16 runs on torch's own kernels"
        )
        yield Check(
            level,
            key,
            message,
            "`pacs-megatron doctor` prints the command; or use slurm/container/Dockerfile",
        )


def needs_gpus(loaded: LoadedConfig) -> bool:
    """Whether the configuration uses GPUs."""
    return loaded.config.resources.gpus_per_node > 0


def in_a_job() -> bool:
    """Whether this is a compute node, where a problem affects the run."""
    return "SLURM_JOB_ID" in os.environ or "RANK" in os.environ


def severity() -> Level:
    """Level of a problem that counts on compute nodes only: a login node may differ."""
    return "fail" if in_a_job() else "warn"


def check_gpus(loaded: LoadedConfig) -> Iterator[Check]:
    """Number, memory and driver of the GPUs; FP8 and Transformer Engine with the policy's own
    checks.
    """
    config = loaded.config
    wanted = config.resources.gpus_per_node
    if not wanted:
        return
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        yield _no_gpu(wanted)
        return
    if found < wanted:
        yield Check(
            "fail",
            "resources.gpus_per_node",
            f"{found} GPUs here, {wanted} wanted",
            f"set it to {found}",
        )
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    planned = (
        constants.GPUS[config.resources.gpu].memory_gib if config.resources.gpu is not None else 0.0
    )
    message = f"{torch.cuda.get_device_name(0)}, {total:.1f} GiB, planned with {planned} GiB"
    fix = "set the installed GPU; otherwise `plan` uses the memory of another one"
    yield judged("resources.gpu", abs(total - planned) < 0.05 * planned, message, fix, "warn")
    from pacs_megatron.policy import precision

    def fits() -> str:
        machine = precision.inspect_machine()
        precision.check(config.precision, machine)
        return precision.describe(config.precision, machine)

    yield attempt("precision", fits)


def _no_gpu(wanted: int) -> Check:
    """The reason why torch finds no GPU: none installed, a CPU build of torch, hidden GPUs, or an
    old driver.
    """
    key = "resources.gpus_per_node"
    if not any(path.exists() for path in DRIVER_FILES):
        if in_a_job():
            return Check(
                "fail",
                key,
                f"{wanted} wanted, but this node has none",
                "request GPUs from Slurm, or set 0",
            )
        return Check("warn", key, "no GPU here (a login node?)", "run preflight inside the job too")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Check(
            "fail", key, "CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES"
        )
    return replace(doctor.cuda(), level="fail")


# ----------------------------------------------------------------------------------------------
# folders and free space
def check_folders(loaded: LoadedConfig) -> Iterator[Check]:
    """Writes a test file to the run's folder and to the scratch folder."""
    run_dir = Path(loaded.config.run.dir)
    scratch = Path(
        os.environ.get("TMPDIR") or tempfile.gettempdir()
    )  # `tempfile` caches its first result
    named = run_dir / loaded.config.run.name
    for key, folder in (("run.dir", named if named.exists() else run_dir), ("TMPDIR", scratch)):
        existing = existing_parent(folder)
        if not existing.is_dir():
            yield Check("fail", key, f"{existing} is a file", "name a folder")
        elif key == "TMPDIR" and existing != folder.absolute():
            fix = "create it, or set TMPDIR (cluster file: scratch) to an existing folder"
            yield Check("fail", key, f"{folder}: no such folder", fix)
        else:
            yield _writable(key, existing, "choose another folder")
    free = shutil.disk_usage(existing_parent(scratch)).free
    if free < MIN_SCRATCH_BYTES:
        level: Level = "fail" if free < TINY_SCRATCH_BYTES else "warn"
        fix = "set TMPDIR (cluster file: scratch) to a folder with more free space"
        yield Check(level, "TMPDIR", f"{free / GIB:.2f} GiB free in {scratch}", fix)


def _writable(key: str, folder: Path, fix: str, otherwise: Level = "fail") -> Check:
    error = disk_error(folder)
    reason = "is writable" if error is None else f"is not writable: {error.strerror}"
    return judged(key, error is None, f"{folder} {reason}", fix, otherwise)


def check_free_space(loaded: LoadedConfig, plan: Plan) -> Iterator[Check]:
    """Free space, quota and files for the checkpoints and the export that `plan` counts."""
    folder = existing_parent(Path(loaded.config.run.dir))
    if not folder.is_dir():
        return  # check_folders reports it
    num_files = plan.num_checkpoints * (FILES_A_CHECKPOINT + 2 * plan.layout.world_size)
    found, unknown = quota.free_space(folder)
    for space in found:
        left = f"{space.num_bytes / GIB:.1f} GiB and {space.num_files:.0f} files left at {folder} ({space.source})"
        need = f"{plan.disk_bytes / GIB:.1f} GiB and about {num_files} files for checkpoints and export"
        is_enough = space.num_bytes >= plan.disk_bytes and space.num_files >= num_files
        fix = "lower it, free some space, or choose another run.dir"
        yield judged("checkpoint.keep_last", is_enough, f"{left}, {need}", fix)
    if unknown is not None:
        yield Check(
            "warn", "quota", unknown, f"make sure that it leaves {plan.disk_bytes / GIB:.0f} GiB"
        )


def check_memory(loaded: LoadedConfig, plan: Plan) -> Iterator[Check]:
    """Compares this host's memory with the plan's host memory.

    Skipped on a login node of a run on GPUs.
    """
    if needs_gpus(loaded) and not in_a_job():
        return
    ranks = plan.layout.world_size // loaded.config.resources.nodes
    need = ranks * plan.host_bytes_per_rank + 2 * memory.host_step_bytes(loaded.config)
    if not needs_gpus(loaded):
        states = (
            state.state_items(loaded.config, plan.spec, plan.layout, s)
            for s in range(plan.layout.pp)
        )
        need += ranks * max(sum(item.num_bytes for item in state) for state in states)
    available = min(psutil.virtual_memory().available, _cgroup_limit())
    text = f"{available / GIB:.1f} GiB of host memory, `plan` needs at least {need / GIB:.1f} GiB"
    fix = (
        "request more (cluster file: mem: '0' for all of the node), or lower batch.prompts_per_step"
    )
    yield judged("memory", available >= need, text, fix)


def _cgroup_limit() -> float:
    """Memory limit of this process's control group in bytes, set by Slurm or a container; infinite
    without a limit.
    """
    limits = [float("inf")]
    for path in CGROUP_LIMITS:
        if path.is_file() and (text := path.read_text(encoding="utf-8").strip()).isdecimal():
            limits.append(float(text))
    return min(limits)


# -------------------------------------------------------------------------------------------------------------
# network
def check_ports(loaded: LoadedConfig) -> Iterator[Check]:
    """Checks that the rendezvous port is free and that the configured addresses belong to this
    host.
    """
    rollout = loaded.config.rollout.sglang
    if (
        rollout is not None
        and rollout.sync.transport == "broadcast"
        and rollout.servers is not None
    ):
        reason = _bind_problem(rollout.sync.host, 0)
        if reason is not None:
            level = "fail" if rollout.sync.host.startswith("127.") else severity()
            message = f"{rollout.sync.host} is no address of this host ({reason})"
            fix = "set the trainer's address: `ip addr` on its first node lists it"
            yield Check(level, "rollout.sync.host", message, fix)
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        return  # the rendezvous of the rank checks uses the port, which is the better test
    given = os.environ.get("MASTER_PORT")
    if given is None and "SLURM_JOB_ID" in os.environ:
        given = str(job_port(os.environ["SLURM_JOB_ID"]))
    if given is not None and not (given.isdecimal() and len(given) < 6 and 0 < int(given) < 65536):
        yield Check(
            "fail",
            "MASTER_PORT",
            f"{given!r} is no port",
            "unset it, or use one from 1024 to 65535",
        )
        return
    port = int(given or 0)
    reason = _bind_problem("", port)
    message = (
        f"port {port}: {reason or 'free'}" if port else f"any free port: {reason or 'available'}"
    )
    yield judged(
        "MASTER_PORT", reason is None, message, "export another MASTER_PORT, or end its process"
    )


def _bind_problem(host: str, port: int) -> str | None:
    with socket.socket() as probe:
        # As in servers: a port whose connections are all in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            return f"name resolution failed: {error.strerror}"
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, "") + f": {error.strerror}"
    return None


def check_network_settings(loaded: LoadedConfig) -> Iterator[Check]:
    """Checks that the configured interfaces and adapters of gloo and NCCL exist."""
    nodes = loaded.config.resources.nodes
    interfaces = psutil.net_if_stats()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if value := os.environ.get(variable):
            yield _interface(variable, value, interfaces, nodes)
        elif nodes > 1 and in_a_job():
            message = f"not set, {nodes} nodes: the default interface may not reach the other nodes"
            fix = f"set it (cluster file: network_interface) to one of {sorted(interfaces)}"
            yield Check("warn", variable, message, fix)
    adapters = sorted(path.name for path in IB_DEVICES.iterdir()) if IB_DEVICES.is_dir() else []
    chosen = os.environ.get("NCCL_IB_HCA")
    if chosen and not _matches(re.sub(r":\d+", "", chosen), adapters):
        message = f"{chosen} matches none of this host's adapters ({', '.join(adapters) or 'none'})"
        yield Check(
            severity(), "NCCL_IB_HCA", message, f"unset it, or name an adapter from {IB_DEVICES}"
        )


def _interface(variable: str, value: str, interfaces: Mapping[str, Any], nodes: int) -> Check:
    names = sorted(interfaces)
    gloo = [name for name in names if name in value.split(",")]
    found = gloo if variable.startswith("GLOO") else _matches(value, names)
    if nodes > 1 and found == ["lo"]:
        message = f"{value} is loopback, but resources.nodes={nodes}"
        return Check("fail", variable, message, "name the interface that reaches the other nodes")
    is_up = any(interfaces[name].isup for name in found)
    message = ", ".join(found) or f"{value} matches no interface here ({', '.join(names)})"
    fix = "set the cluster file's network_interface to one that is up; `ip link` lists them"
    return judged(
        variable, is_up, message if is_up or not found else f"{message} is down", fix, severity()
    )


def _matches(value: str, names: list[str]) -> list[str]:
    """NCCL's syntax: prefixes separated by commas; `=` requires whole names, `^` selects all
    others.
    """
    excluded = value.startswith("^")
    exact = value.lstrip("^").startswith("=")
    wanted = [part for part in value.lstrip("^=").split(",") if part]
    hit = [
        name
        for name in names
        if any(name == part or (not exact and name.startswith(part)) for part in wanted)
    ]
    return [name for name in names if name not in hit] if excluded else hit


# -------------------------------------------------------------------------------------------------------------
# cluster
def check_cluster(path: Path) -> Iterator[Check]:
    """Folders, image and interface of a site's file. On a login node a missing one is a warning."""
    try:
        cluster = load_cluster(path)
    except PacsError as error:
        yield Check("fail", "cluster", str(error))
        return
    level = severity()
    if cluster.scratch is not None and "$" not in cluster.scratch:
        yield _writable(
            "scratch", Path(cluster.scratch), "set a folder that every compute node has", level
        )
    interfaces = sorted(psutil.net_if_stats())
    if cluster.network_interface is not None and cluster.network_interface not in interfaces:
        message = (
            f"{cluster.network_interface} is no interface of this host ({', '.join(interfaces)})"
        )
        yield Check(level, "network_interface", message, "`ip link` on a compute node lists them")
    container = cluster.container
    if container is None:
        paths = [
            ("python", cluster.python[0], "name the interpreter that has pacs_megatron", level)
        ]
    else:
        fix = "build it from slurm/container/Dockerfile, or correct the path"
        paths = [
            (
                "container.image",
                container.image if container.image.startswith("/") else "",
                fix,
                "fail",
            )
        ]
        paths += [
            ("container.mounts", mount.split(":")[0], "correct the path", level)
            for mount in container.mounts
        ]
    for key, name, fix, level in paths:
        if "/" in name and not Path(name).exists():
            yield Check(level, key, f"{name} does not exist here", fix)
