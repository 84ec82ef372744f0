"""Schema of a cluster file (configs/clusters/*.yaml): settings of a site, independent of the run."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, ValidationError

from pacs_megatron.config.options import Options
from pacs_megatron.config.yaml_tree import read_yaml
from pacs_megatron.errors import ConfigError


class ContainerOptions(Options):
    """Container image for all tasks."""

    runtime: Literal["pyxis", "apptainer", "enroot"]
    """`pyxis` uses srun's --container-image; the others put a command before the interpreter."""
    image: str
    """Image name or path, in the syntax of the runtime."""
    mounts: tuple[str, ...] = Field(default=(), strict=False)
    """Bind mounts: `/path` or `/host/path:/container/path`."""


class ClusterConfig(Options):
    """Settings of a cluster."""

    name: str
    """Name of the cluster, for messages."""
    account: str | None = None
    """Slurm account (`--account`)."""
    partition: str | None = None
    """Slurm partition (`--partition`)."""
    qos: str | None = None
    """Slurm quality of service (`--qos`)."""
    constraint: str | None = None
    """Node features (`--constraint`)."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """Slurm option that requests GPUs. `none`: the site allocates whole nodes, or has no GPUs."""
    exclusive: bool = True
    """Request whole nodes (`--exclusive`)."""
    cpus_per_task: PositiveInt | None = None
    """CPU cores per task; null uses Slurm's default."""
    mem: str | None = None
    """Memory per node (`--mem`); `"0"` requests all of it."""
    modules: tuple[Annotated[str, Field(pattern=r"^[\w./+:@-]+$")], ...] = Field(default=(), strict=False)
    """Environment modules to load, in order."""
    setup: tuple[str, ...] = Field(default=(), strict=False)
    """Shell lines that the batch script runs before the first task, on the first node."""
    python: tuple[str, ...] = Field(default=("python",), strict=False, min_length=1)
    """Interpreter with pacs_megatron, as a list of words: an absolute path, or a name on PATH after `modules` and `setup`.
    With `container`, the interpreter in the image; the batch script then uses the interpreter that runs `submit`."""
    container: ContainerOptions | None = None
    """Container image for all tasks; null runs them on the host."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """Launcher of the ranks: srun, or one torchrun per node."""
    cpu_bind: str | None = None
    """srun's --cpu-bind, such as `cores` or `map_ldom:0,0,0,0,1,1,1,1` (the NUMA domain of each rank)."""
    network_interface: str | None = None
    """Network interface of gloo and of NCCL's bootstrap (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."""
    scratch: str | None = None
    """Node-local folder, set as TMPDIR."""
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = Field(default_factory=dict)
    """Environment variables of all tasks, such as HF_HOME."""
    srun_args: tuple[str, ...] = Field(default=(), strict=False)
    """More arguments of srun."""

    def task_environment(self) -> dict[str, str]:
        """Environment variables of all tasks."""
        found = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        if self.network_interface is not None:
            found |= {"GLOO_SOCKET_IFNAME": self.network_interface, "NCCL_SOCKET_IFNAME": self.network_interface}
        if self.scratch is not None:
            found["TMPDIR"] = self.scratch
        return found | self.env

    def command_prefix(self) -> list[str]:
        """Words before each program: the container command of apptainer and enroot, else empty."""
        container = self.container
        if container is None or container.runtime == "pyxis":
            return []
        mounts = ",".join(container.mounts)
        if container.runtime == "apptainer":
            return ["apptainer", "exec", "--nv", *(["--bind", mounts] if mounts else []), container.image]
        return ["enroot", "start", *(f"--mount={mount}" for mount in container.mounts), container.image]


def load_cluster(path: Path) -> ClusterConfig:
    """Read and validate a cluster file. Raises ConfigError."""
    tree = read_yaml(path, str(path))
    try:
        return ClusterConfig.model_validate(tree.plain())
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(str(part) for part in detail["loc"])
        node = tree.at(detail["loc"]) or tree
        if detail["type"] == "extra_forbidden":
            close = difflib.get_close_matches(key, list(ClusterConfig.model_fields), n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"known: {', '.join(ClusterConfig.model_fields)}"
            raise ConfigError(f"unknown key `{key}`; {hint} ({node.origin})") from None
        if detail["type"] == "missing":
            raise ConfigError(f"`{key}` is missing; add it ({node.origin})") from None
        message = detail["msg"][0].lower() + detail["msg"][1:].replace("valid tuple", "list, such as [python]")
        raise ConfigError(f"{key}: {message}, got {detail['input']!r}; correct it ({node.origin})") from None
