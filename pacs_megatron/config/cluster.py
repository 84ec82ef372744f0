"""Schema of a cluster file (configs/clusters/*.yaml): settings of a site, for all runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from pacs_megatron.config.messages import explain_validation
from pacs_megatron.config.text import (
    Constraint,
    CpuBind,
    EnvironmentName,
    Identifier,
    Interface,
    Line,
    MemorySize,
    ModuleName,
    Mount,
    PathText,
    Word,
)
from pacs_megatron.config.yaml_tree import read_yaml
from pacs_megatron.contracts.options import Options
from pacs_megatron.errors import ConfigError

KERNEL_CACHES = {
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_JIT_CACHE_DIR": "sglang/jit",  # does not follow SGLANG_CACHE_DIR
    "FLASHINFER_WORKSPACE_BASE": "",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "CUDA_CACHE_PATH": "nv",
}
"""Environment variable -> subfolder of `kernel_cache`. By default these caches are in $HOME, where
processes of all nodes wait for each other's locks, and where flock may not work.
"""


def kernel_cache(scratch: str) -> str:
    """The folder of compiled kernels; the user's own, because several may share `scratch`."""
    return f"{scratch.rstrip('/')}/pacs-kernels-{os.getuid()}"


class ContainerOptions(Options):
    """Container image for all tasks."""

    runtime: Literal["pyxis", "apptainer", "enroot"]
    """`pyxis` uses srun's --container-image; the others put a command before the interpreter."""

    image: Word
    """Image name or path, in the syntax of the runtime."""

    mounts: tuple[Mount, ...] = Field(default=(), strict=False)
    """Bind mounts: `/path` or `/host/path:/container/path`."""


class ClusterConfig(Options):
    """Settings of a cluster."""

    name: Line
    """Name of the cluster, for messages."""

    account: Identifier | None = None
    """Slurm account (`--account`)."""

    partition: Identifier | None = None
    """Slurm partition (`--partition`)."""

    qos: Identifier | None = None
    """Slurm quality of service (`--qos`)."""

    constraint: Constraint | None = None
    """Node features (`--constraint`)."""

    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """Slurm option that requests GPUs. `none`: the site allocates whole nodes, or has no GPUs."""

    exclusive: bool = True
    """Request whole nodes (`--exclusive`)."""

    cpus_per_task: int | None = Field(default=None, gt=0, le=65536)
    """CPU cores per rank; null uses Slurm's default.

    Required by `cpu_bind: cores` and `cpu_bind: threads`.
    """

    mem: MemorySize | None = None
    """Memory per node (`--mem`); `"0"` requests all of it."""

    modules: tuple[ModuleName, ...] = Field(default=(), strict=False)
    """Environment modules to load, in order."""

    setup: tuple[Line, ...] = Field(default=(), strict=False)
    """Shell lines that the batch script runs before the first task, on the first node."""

    python: tuple[Word, ...] = Field(default=("python",), strict=False, min_length=1)
    """Interpreter with pacs_megatron, as a list of words: an absolute path, or a name on PATH after
    `modules` and `setup`; with `container`, in the image.
    """

    container: ContainerOptions | None = None
    """Container image for all tasks; null runs them on the host."""

    launcher: Literal["srun", "torchrun"] = "srun"
    """Launcher of the ranks: srun, or one torchrun per node."""

    cpu_bind: CpuBind | None = None
    """srun's --cpu-bind, such as `map_ldom:0,0,0,0,1,1,1,1` (the NUMA domain of each rank). By
    default every process starts with all cores of its node, and ranks and servers choose theirs
    near their GPU.
    """

    network_interface: Interface | None = None
    """Network interface of gloo and of NCCL's bootstrap (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME).
    """

    scratch: PathText | None = None
    """Node-local folder, set as TMPDIR. Compiled kernels are cached in a subfolder."""

    env: dict[EnvironmentName, Word] = Field(default_factory=dict)
    """Environment variables of all tasks, such as HF_HOME."""

    srun_args: tuple[Line, ...] = Field(default=(), strict=False)
    """More arguments of srun."""

    @model_validator(mode="after")
    def _check_binding(self) -> ClusterConfig:
        if self.scratch is not None and not self.scratch.startswith("/"):
            raise ValueError(
                f"scratch={self.scratch}: expected an absolute path, which exists on every node"
            )

        words = (self.cpu_bind or "").split(",")
        binds_to_cores = any(re.fullmatch("cores?|threads?|rank", word) for word in words)
        if self.cpus_per_task is None and binds_to_cores:
            raise ValueError(
                f"cpu_bind={self.cpu_bind} without cpus_per_task binds a rank with its driver and "
                "workers to one core; set cpus_per_task to the cores of a node divided by its ranks"
            )
        return self

    def task_environment(self) -> dict[str, str]:
        """Environment variables of all tasks; `env` wins."""
        variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        if self.network_interface is not None:
            variables["GLOO_SOCKET_IFNAME"] = self.network_interface
            variables["NCCL_SOCKET_IFNAME"] = self.network_interface
        if self.scratch is not None:
            variables["TMPDIR"] = self.scratch
            cache = kernel_cache(self.scratch)
            for name, subfolder in KERNEL_CACHES.items():
                variables[name] = f"{cache}/{subfolder}".rstrip("/")
        return variables | self.env

    def command_prefix(self) -> list[str]:
        """Words before each program: the container command of apptainer and enroot, else empty."""
        container = self.container
        if container is None or container.runtime == "pyxis":
            return []
        if container.runtime == "apptainer":
            mounts = ",".join(container.mounts)
            options = ["--bind", mounts] if mounts else []
            return ["apptainer", "exec", "--nv", *options, container.image]
        options = [f"--mount={mount}" for mount in container.mounts]
        return ["enroot", "start", *options, container.image]


def load_cluster(path: Path) -> ClusterConfig:
    """Reads and validates a cluster file. Raises ConfigError."""
    tree = read_yaml(path, str(path))
    try:
        return ClusterConfig.model_validate(tree.plain())
    except ValidationError as error:
        raise ConfigError(explain_validation(error.errors(), tree, ClusterConfig)) from None
