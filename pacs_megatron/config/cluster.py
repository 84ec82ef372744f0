"""A site's own words, apart from the run's: configs/clusters/*.yaml."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, ValidationError

from pacs_megatron.config.options import Options
from pacs_megatron.config.yaml_tree import read_yaml
from pacs_megatron.errors import ConfigError


class ContainerOptions(Options):
    """Runs every task inside an image."""

    runtime: Literal["pyxis", "apptainer", "enroot"]
    """`pyxis`: srun's own --container-image; the others: a command before the interpreter."""
    image: str
    mounts: tuple[str, ...] = Field(default=(), strict=False)
    """`/path` or `/host/path:/container/path`."""


class ClusterConfig(Options):
    """One cluster."""

    name: str
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How the site wants GPUs asked for; `none`: whole nodes are given, or there are no GPUs."""
    exclusive: bool = True
    cpus_per_task: PositiveInt | None = None
    """CPU cores of one rank; None: Slurm's default."""
    mem: str | None = None
    """`--mem`, such as `0` for all of a node's memory."""
    modules: tuple[Annotated[str, Field(pattern=r"^[\w./+:@-]+$")], ...] = Field(default=(), strict=False)
    """`module load` of each, in order."""
    setup: tuple[str, ...] = Field(default=(), strict=False)
    """Shell lines before the first task, on the first node."""
    python: tuple[str, ...] = Field(default=("python",), strict=False, min_length=1)
    """Interpreter that has pacs_megatron, as a list; absolute, or found after `modules` and `setup`. With `container`, the
    image's; the batch script, which runs outside, uses the interpreter that `submit` ran with."""
    container: ContainerOptions | None = None
    launcher: Literal["srun", "torchrun"] = "srun"
    """Who starts ranks: Slurm itself, or one torchrun a node."""
    cpu_bind: str | None = None
    """srun's --cpu-bind, such as `cores` or `map_ldom:0,0,0,0,1,1,1,1` (NUMA domain of each rank)."""
    network_interface: str | None = None
    """For gloo and NCCL's first handshake (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."""
    scratch: str | None = None
    """Fast node-local folder, given to programs as TMPDIR."""
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = Field(default_factory=dict)
    """More environment variables, such as HF_HOME."""
    srun_args: tuple[str, ...] = Field(default=(), strict=False)

    def task_environment(self) -> dict[str, str]:
        """What every task gets in its environment."""
        found = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        if self.network_interface is not None:
            found |= {"GLOO_SOCKET_IFNAME": self.network_interface, "NCCL_SOCKET_IFNAME": self.network_interface}
        if self.scratch is not None:
            found["TMPDIR"] = self.scratch
        return found | self.env

    def command_prefix(self) -> list[str]:
        """What stands before every program: a container command, where the site has one outside srun."""
        container = self.container
        if container is None or container.runtime == "pyxis":
            return []
        mounts = ",".join(container.mounts)
        if container.runtime == "apptainer":
            return ["apptainer", "exec", "--nv", *(["--bind", mounts] if mounts else []), container.image]
        return ["enroot", "start", *(f"--mount={mount}" for mount in container.mounts), container.image]


def load_cluster(path: Path) -> ClusterConfig:
    """Raises ConfigError, one line, for a file that cannot be read or does not fit the schema."""
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
