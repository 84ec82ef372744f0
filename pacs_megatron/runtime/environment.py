"""Finds a process's rank (torchrun, srun or alone), the environment variables of ranks, and
installed versions.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.waiting import run_program

_KNOWN_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
)
PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "sglang",
    "datasets",
    "math-verify",
    "pydantic",
    "nemo-run",
    "numpy",
)
"""Packages whose versions a run and a crash report record."""
Version = tuple[int, int]
"""(major, minor)"""
_TE_RANGES: dict[Version, tuple[Version, Version]] = {
    (0, 16): ((2, 9), (2, 12)),
    (0, 19): ((2, 14), (2, 21)),
}
"""oldest megatron-core -> the Transformer Engine that it requires (its pyproject and its imports):
from the first version, below the second one
"""
DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))
"""Files of a host with an NVIDIA driver."""
VISIBLE_GPUS = "PACS_VISIBLE_GPUS"
"""CUDA_VISIBLE_DEVICES of the trainer, for the driver, which uses no GPU but starts servers."""


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Names of the GPUs of the trainer's ranks, by local rank; empty without CUDA_VISIBLE_DEVICES
    (all GPUs).
    """
    text = environ.get(VISIBLE_GPUS, environ.get("CUDA_VISIBLE_DEVICES", ""))
    return [name.strip() for name in text.split(",") if name.strip()]


def hide_gpus() -> bool:
    """Hides this host's GPUs from torch, which has not used CUDA yet.

    Returns whether there may be some.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return any(path.exists() for path in DRIVER_FILES)


def own_address(environ: Mapping[str, str]) -> str | None:
    """Name or address at which other nodes of a Slurm job reach this one; None outside of Slurm.

    `PACS_NODE_ADDR` replaces Slurm's name of the node.
    """
    return environ.get("PACS_NODE_ADDR") or environ.get("SLURMD_NODENAME") or None


def installed(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parse_version(text: str | None) -> Version | None:
    """(major, minor) of a version's text; None of None."""
    if text is None:
        return None
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def version_text(value: Version) -> str:
    """`major.minor`."""
    return f"{value[0]}.{value[1]}"


def transformer_engine_problem(engine: Version, megatron: Version) -> str | None:
    """Why this Transformer Engine does not fit this megatron-core, in one line, or None."""
    oldest = max(version for version in _TE_RANGES if version <= megatron)
    low, high = _TE_RANGES[oldest]
    if low <= engine < high:
        return None
    return (
        f"Transformer Engine {version_text(engine)} is not supported by megatron-core "
        f"{version_text(megatron)}, which needs >= {version_text(low)} and < {version_text(high)}; "
        "install such a transformer-engine"
    )


ApexKind = Literal["none", "nvidia", "no kernels", "foreign"]
"""Installed package `apex`: none, NVIDIA's, NVIDIA's without CUDA kernels, or PyPI's namesake."""


def apex_kind() -> ApexKind:
    """The package that is installed as `apex`; it is not imported.

    PyPI's `apex` is a web toolkit. NVIDIA's has `apex/optimizers` and, built with `--cuda_ext`, the
    module `amp_C`.
    """
    spec = find_spec("apex")
    # Without an origin it is a folder of this name in the working directory, not a package.
    if spec is None or spec.origin is None:
        return "none"
    folders = spec.submodule_search_locations or ()
    if not any((Path(folder) / "optimizers").is_dir() for folder in folders):
        return "foreign"
    return "nvidia" if find_spec("amp_C") is not None else "no kernels"


def check_apex() -> None:
    """Raises ConfigError if PyPI's `apex` is installed: Megatron-Core imports `apex` by name."""
    if apex_kind() == "foreign":
        version = installed("apex") or "of unknown version"
        raise ConfigError(
            f"the installed package apex {version} is PyPI's web toolkit, expected NVIDIA's or "
            "none: Megatron-Core imports it by name; run `pip uninstall apex`"
        )


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank and rendezvous of this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """The environment that `torch.distributed` reads (`env://`)."""
        return {name.upper(): str(value) for name, value in asdict(self).items()}

    def is_consistent(self) -> bool:
        """Whether the ranks are in their ranges, and port and address can be those of a host."""
        return (
            0 <= self.local_rank < self.local_world_size <= self.world_size
            and 0 <= self.rank < self.world_size
            and 0 < self.master_port < 65536
            and self.master_addr.split() == [self.master_addr]
        )


def find_rank(environ: Mapping[str, str]) -> RankPlace | None:
    """The place of this process if torchrun or srun started it as a rank, else None.

    Raises:
        ConfigError: The launcher's variables are incomplete or contradict each other.
    """
    # A batch script also has SLURM_PROCID; only tasks of srun have a step id.
    if "RANK" in environ and "WORLD_SIZE" in environ:
        launcher = "torchrun"
        read_place = _from_torchrun
    elif "SLURM_STEP_ID" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        launcher = "srun"
        read_place = _from_srun
    else:
        return None

    try:
        place = read_place(environ)
    except KeyError as error:
        text = f"the environment is that of {launcher}, but {error.args[0]} is not set"
        raise ConfigError(f"{text}; start ranks by torchrun or srun, or unset RANK") from None
    except ValueError as error:
        raise ConfigError(
            f"a variable of {launcher} is no integer: {error}; correct the launcher"
        ) from None
    if not place.is_consistent():
        raise ConfigError(
            f"the environment of {launcher} is inconsistent: {place}; correct the launcher"
        )
    return place


def _from_torchrun(environ: Mapping[str, str]) -> RankPlace:
    names = [field.name for field in fields(RankPlace) if field.type is int]
    numbers = {name: int(environ[name.upper()]) for name in names}
    return RankPlace(master_addr=environ["MASTER_ADDR"], **numbers)


def _from_srun(environ: Mapping[str, str]) -> RankPlace:
    # The tasks of each node of the step: `4(x2),1` is 4, 4, 1.
    tasks_here = environ["SLURM_STEP_TASKS_PER_NODE"].split(",")[0].split("(")[0]
    return RankPlace(
        rank=int(environ["SLURM_PROCID"]),
        world_size=int(environ["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world_size=int(tasks_here),
        master_addr=environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        master_port=int(environ.get("MASTER_PORT") or job_port(environ["SLURM_JOB_ID"])),
    )


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list such as `n[1-4]`, expanded by `scontrol`."""
    done = run_program(["scontrol", "show", "hostnames", node_list])
    if done.returncode or not done.stdout:
        raise ConfigError(
            f"scontrol cannot expand the node list {node_list!r}: {done.stderr.strip()}; set "
            "MASTER_ADDR"
        )
    return done.stdout.split()[0]


def job_port(job_id: str) -> int:
    """A port that all tasks of a job compute alike, below Linux's ephemeral ports (32768)."""
    if not job_id.isdecimal() or len(job_id) > 18:
        raise ConfigError(f"SLURM_JOB_ID={job_id!r}: expected a number; unset it outside a job")
    return 20000 + int(job_id) % 12000


def check_secret(name: str, key: str | None = None) -> None:
    """Checks that an HTTP header can contain the value of the variable `name`, if it is set.

    Args:
        name: of the environment variable.
        key: the configuration key that names the variable, for the error.

    Raises:
        ConfigError: The value has a line end, a space or another such character; it is not printed.
    """
    value = os.environ.get(name, "")
    if not all("!" <= character <= "~" for character in value):
        where = name if key is None else f"{key}={name}"
        raise ConfigError(
            f"{where} contains a line end, a space or another character that is not allowed in a "
            "token; export it without"
        )


def rank_environment(local_world_size: int, *, single_host: bool) -> dict[str, str]:
    """The environment of a rank: this process's variables, and defaults for those that are not
    set.
    """
    cores = len(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // local_world_size)),
        # Megatron overlaps tensor-parallel communication by the order of kernels in a single queue.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONUNBUFFERED": "1",
        # Seconds that torchrun (2.11 and later) waits for the other ranks after one has ended; they
        # may be saving.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
        # Megatron repeats these on every rank; the policy logs once what is missing.
        "PYTHONWARNINGS": ",".join(f"ignore:{start}" for start in _KNOWN_WARNINGS),
    }
    if single_host:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    return defaults | os.environ
