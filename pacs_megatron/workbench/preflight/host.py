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
from pacs_megatron.runtime.gpus import GPUS
from pacs_megatron.workbench.plan.memory import host_step_bytes
from pacs_megatron.workbench.plan.plan import Plan
from pacs_megatron.workbench.plan.state import state_items, total_bytes
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
_SOFTWARE = ("torch", "megatron-core", "transformers", "datasets")
"""Packages whose versions the report prints"""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


# ------------------------------------------------------------------------------- software and GPUs
def check_software(loaded: LoadedConfig) -> Iterator[Check]:
    """The problems that `doctor` finds in the software, or one line."""
    rows = [*doctor.python(), *doctor.packages(), doctor.apex()]
    if needs_gpus(loaded):
        rows.append(doctor.transformer_engine())
    problems = [row for row in rows if row.level in ("warn", "fail")]
    yield from problems
    if not problems:
        versions = ", ".join(f"{name} {installed(name)}" for name in _SOFTWARE)
        yield Check("ok", "software", versions)

    is_bf16 = loaded.config.precision.dtype == "bf16"
    if needs_gpus(loaded) and is_bf16 and installed("transformer-engine") is None:
        yield _no_transformer_engine(has_fp8=loaded.config.precision.fp8 is not None)


def _no_transformer_engine(*, has_fp8: bool) -> Check:
    """FP8 needs it on the nodes of a job; bf16 has slower kernels without it."""
    level: Level = "fail" if has_fp8 and in_a_job() else "warn"
    key = "precision.fp8" if has_fp8 else "transformer-engine"
    message = (
        "Transformer Engine is not installed here: no FP8, and bf16 runs on torch's own kernels"
    )
    fix = "`pacs-megatron doctor` prints the command; or use slurm/container/Dockerfile"
    return Check(level, key, message, fix)


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
    num_configured = config.resources.gpus_per_node
    if not num_configured:
        return
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_gpus:
        yield _no_gpu(num_configured)
        return
    if num_gpus < num_configured:
        message = f"{num_gpus} GPUs here, {num_configured} wanted"
        yield Check("fail", "resources.gpus_per_node", message, f"set it to {num_gpus}")

    total_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    planned_gib = 0.0
    if config.resources.gpu is not None:
        planned_gib = GPUS[config.resources.gpu].memory_gib
    is_planned = abs(total_gib - planned_gib) < 0.05 * planned_gib
    name = torch.cuda.get_device_name(0)
    message = f"{name}, {total_gib:.1f} GiB, planned with {planned_gib} GiB"
    fix = "set the installed GPU; otherwise `plan` uses the memory of another one"
    yield judged("resources.gpu", is_planned, message, fix, "warn")

    from pacs_megatron.policy import precision

    def check_precision() -> str:
        machine = precision.inspect_machine()
        precision.check(config.precision, machine)
        return precision.describe(config.precision, machine)

    yield attempt("precision", check_precision)


def _no_gpu(num_configured: int) -> Check:
    """The reason why torch finds no GPU: none installed, a CPU build of torch, hidden GPUs, or an
    old driver.
    """
    key = "resources.gpus_per_node"
    if not any(path.exists() for path in DRIVER_FILES):
        if in_a_job():
            message = f"{num_configured} wanted, but this node has none"
            return Check("fail", key, message, "request GPUs from Slurm, or set 0")
        return Check("warn", key, "no GPU here (a login node?)", "run preflight inside the job too")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        message = "CUDA_VISIBLE_DEVICES hides every GPU"
        return Check("fail", key, message, "unset CUDA_VISIBLE_DEVICES")
    return replace(doctor.cuda(), level="fail")


# --------------------------------------------------------------------- folders, free space, memory
def check_folders(loaded: LoadedConfig) -> Iterator[Check]:
    """Writes a test file to the run's folder and to the scratch folder."""
    run_dir = Path(loaded.config.run.dir)
    folder_of_run = run_dir / loaded.config.run.name
    yield _folder("run.dir", folder_of_run if folder_of_run.exists() else run_dir)

    # `tempfile` caches its first result, which a later TMPDIR does not change.
    scratch = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    existing = existing_parent(scratch)
    if existing.is_dir() and existing != scratch.absolute():
        fix = "create it, or set TMPDIR (cluster file: scratch) to an existing folder"
        yield Check("fail", "TMPDIR", f"{scratch}: no such folder", fix)
    else:
        yield _folder("TMPDIR", scratch)

    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < MIN_SCRATCH_BYTES:
        level: Level = "fail" if free_bytes < TINY_SCRATCH_BYTES else "warn"
        fix = "set TMPDIR (cluster file: scratch) to a folder with more free space"
        yield Check(level, "TMPDIR", f"{free_bytes / GIB:.2f} GiB free in {scratch}", fix)


def _folder(key: str, folder: Path) -> Check:
    """Whether this folder, or the existing one above it, is writable."""
    existing = existing_parent(folder)
    if not existing.is_dir():
        return Check("fail", key, f"{existing} is a file", "name a folder")
    return _writable(key, existing, "choose another folder")


def _writable(key: str, folder: Path, fix: str, otherwise: Level = "fail") -> Check:
    error = disk_error(folder)
    reason = "is writable" if error is None else f"is not writable: {error.strerror}"
    return judged(key, error is None, f"{folder} {reason}", fix, otherwise)


def check_free_space(loaded: LoadedConfig, plan: Plan) -> Iterator[Check]:
    """Free space, quota and files for the checkpoints and the export that `plan` counts."""
    folder = existing_parent(Path(loaded.config.run.dir))
    if not folder.is_dir():
        return  # check_folders reports it

    needed_bytes = plan.disk_bytes
    files_per_checkpoint = FILES_A_CHECKPOINT + 2 * plan.layout.world_size
    needed_files = plan.num_checkpoints * files_per_checkpoint
    spaces, unknown_quota = quota.free_space(folder)
    for space in spaces:
        message = (
            f"{space.num_bytes / GIB:.1f} GiB and {space.num_files:.0f} files left at {folder} "
            f"({space.source}), {needed_bytes / GIB:.1f} GiB and about {needed_files} files for "
            "checkpoints and export"
        )
        is_enough = space.num_bytes >= needed_bytes and space.num_files >= needed_files
        fix = "lower it, free some space, or choose another run.dir"
        yield judged("checkpoint.keep_last", is_enough, message, fix)

    if unknown_quota is not None:
        fix = f"make sure that it leaves {needed_bytes / GIB:.0f} GiB"
        yield Check("warn", "quota", unknown_quota, fix)


def check_memory(loaded: LoadedConfig, plan: Plan) -> Iterator[Check]:
    """Compares this host's memory with the plan's host memory.

    Skipped on a login node of a run on GPUs.
    """
    if needs_gpus(loaded) and not in_a_job():
        return
    ranks = plan.layout.world_size // loaded.config.resources.nodes
    # The samples are on rank 0 and in the driver.
    needed_bytes = ranks * plan.host_bytes_per_rank + 2 * host_step_bytes(loaded.config)
    if not needs_gpus(loaded):
        bytes_of_stages = []
        for stage in range(plan.layout.pp):
            items = state_items(loaded.config, plan.spec, plan.layout, stage)
            bytes_of_stages.append(total_bytes(items))
        needed_bytes += ranks * max(bytes_of_stages)

    available_bytes = min(psutil.virtual_memory().available, _cgroup_limit())
    message = (
        f"{available_bytes / GIB:.1f} GiB of host memory, `plan` needs at least "
        f"{needed_bytes / GIB:.1f} GiB"
    )
    fix = (
        "request more (cluster file: mem: '0' for all of the node), or lower batch.prompts_per_step"
    )
    yield judged("memory", available_bytes >= needed_bytes, message, fix)


def _cgroup_limit() -> float:
    """Memory limit of this process's control group in bytes, set by Slurm or a container; infinite
    without a limit.
    """
    limits = [float("inf")]
    for path in CGROUP_LIMITS:
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8").strip()
        if text.isdecimal():  # `max`: no limit
            limits.append(float(text))
    return min(limits)


# ----------------------------------------------------------------------------------------- network
def check_ports(loaded: LoadedConfig) -> Iterator[Check]:
    """Checks that the rendezvous port is free and that the configured addresses belong to this
    host.
    """
    yield from _sync_host(loaded)
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        return  # the rendezvous of the rank checks uses the port, which is the better test

    port_text = os.environ.get("MASTER_PORT")
    if port_text is None and "SLURM_JOB_ID" in os.environ:
        port_text = str(job_port(os.environ["SLURM_JOB_ID"]))
    if port_text is not None and not _is_port(port_text):
        fix = "unset it, or use one from 1024 to 65535"
        yield Check("fail", "MASTER_PORT", f"{port_text!r} is no port", fix)
        return

    port = int(port_text or 0)
    reason = _bind_problem("", port)
    if port:
        message = f"port {port}: {reason or 'free'}"
    else:
        message = f"any free port: {reason or 'available'}"
    fix = "export another MASTER_PORT, or end its process"
    yield judged("MASTER_PORT", reason is None, message, fix)


def _is_port(text: str) -> bool:
    return text.isdecimal() and len(text) < 6 and 0 < int(text) < 65536


def _sync_host(loaded: LoadedConfig) -> Iterator[Check]:
    """A failure if this host does not have the address to which managed servers connect for a
    broadcast.
    """
    rollout = loaded.config.rollout.sglang
    if rollout is None or rollout.servers is None or rollout.sync.transport != "broadcast":
        return
    host = rollout.sync.host
    reason = _bind_problem(host, 0)
    if reason is not None:
        level = "fail" if host.startswith("127.") else severity()
        message = f"{host} is no address of this host ({reason})"
        fix = "set the trainer's address: `ip addr` on its first node lists it"
        yield Check(level, "rollout.sync.host", message, fix)


def _bind_problem(host: str, port: int) -> str | None:
    """The reason why no server can bind this address, or None."""
    with socket.socket() as probe:
        # Same as in servers: a port whose connections are all in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            return f"name resolution failed: {error.strerror}"
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "")
            return f"{code}: {error.strerror}"
    return None


def check_network_settings(loaded: LoadedConfig) -> Iterator[Check]:
    """Checks that the configured interfaces and adapters of gloo and NCCL exist."""
    nodes = loaded.config.resources.nodes
    interfaces = psutil.net_if_stats()
    for variable in _INTERFACE_VARIABLES:
        value = os.environ.get(variable)
        if value:
            yield _interface(variable, value, interfaces, nodes)
        elif nodes > 1 and in_a_job():
            message = f"not set, {nodes} nodes: the default interface may not reach the other nodes"
            fix = f"set it (cluster file: network_interface) to one of {sorted(interfaces)}"
            yield Check("warn", variable, message, fix)

    adapters = sorted(path.name for path in IB_DEVICES.iterdir()) if IB_DEVICES.is_dir() else []
    selection = os.environ.get("NCCL_IB_HCA")
    if not selection:
        return
    without_ports = re.sub(r":\d+", "", selection)
    if not _matches(without_ports, adapters):
        names = ", ".join(adapters) or "none"
        message = f"{selection} matches none of this host's adapters ({names})"
        fix = f"unset it, or name an adapter from {IB_DEVICES}"
        yield Check(severity(), "NCCL_IB_HCA", message, fix)


def _interface(variable: str, value: str, interfaces: Mapping[str, Any], nodes: int) -> Check:
    """Whether the variable selects an interface that is up.

    Args:
        variable: GLOO_SOCKET_IFNAME, a list of whole names, or NCCL_SOCKET_IFNAME.
        value: of the variable.
        interfaces: name -> psutil's state.
        nodes: of the run; loopback reaches no other one.
    """
    names = sorted(interfaces)
    if variable.startswith("GLOO"):
        selected = [name for name in names if name in value.split(",")]
    else:
        selected = _matches(value, names)
    if nodes > 1 and selected == ["lo"]:
        message = f"{value} is loopback, but resources.nodes={nodes}"
        return Check("fail", variable, message, "name the interface that reaches the other nodes")

    is_up = any(interfaces[name].isup for name in selected)
    message = ", ".join(selected)
    if not selected:
        message = f"{value} matches no interface here ({', '.join(names)})"
    elif not is_up:
        message += " is down"
    fix = "set the cluster file's network_interface to one that is up; `ip link` lists them"
    return judged(variable, is_up, message, fix, severity())


def _matches(value: str, names: list[str]) -> list[str]:
    """The names that a value selects in NCCL's syntax.

    Prefixes are separated by commas; `=` requires whole names, `^` selects all others.
    """
    is_excluding = value.startswith("^")
    is_exact = value.lstrip("^").startswith("=")
    patterns = tuple(part for part in value.lstrip("^=").split(",") if part)

    matching = []
    for name in names:
        if name in patterns or (not is_exact and name.startswith(patterns)):
            matching.append(name)
    if is_excluding:
        return [name for name in names if name not in matching]
    return matching


# ------------------------------------------------------------------------------------ cluster file
def check_cluster(path: Path) -> Iterator[Check]:
    """Folders, image and interface of a site's file. On a login node a missing one is a warning."""
    try:
        cluster = load_cluster(path)
    except PacsError as error:
        yield Check("fail", "cluster", str(error))
        return
    level = severity()
    if cluster.scratch is not None and "$" not in cluster.scratch:
        fix = "set a folder that every compute node has"
        yield _writable("scratch", Path(cluster.scratch), fix, level)

    interfaces = sorted(psutil.net_if_stats())
    if cluster.network_interface is not None and cluster.network_interface not in interfaces:
        names = ", ".join(interfaces)
        message = f"{cluster.network_interface} is no interface of this host ({names})"
        yield Check(level, "network_interface", message, "`ip link` on a compute node lists them")

    container = cluster.container
    if container is None:
        fix = "name the interpreter that has pacs_megatron"
        yield from _path("python", cluster.python[0], fix, level)
        return
    # An image may also be a name, in the syntax of the runtime. A mount is `host` or
    # `host:container`.
    if container.image.startswith("/"):
        fix = "build it from slurm/container/Dockerfile, or correct the path"
        yield from _path("container.image", container.image, fix, "fail")
    for mount in container.mounts:
        source = mount.split(":")[0]
        yield from _path("container.mounts", source, "correct the path", level)


def _path(key: str, path: str, fix: str, level: Level) -> Iterator[Check]:
    """A line if the path does not exist; a name without a slash is found by PATH."""
    if "/" in path and not Path(path).exists():
        yield Check(level, key, f"{path} does not exist here", fix)
