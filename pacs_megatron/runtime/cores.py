"""Cores of the processes of a node: each rank near its GPU, servers and the driver on others.

A batch script starts every process with all cores of the node. Each rank then keeps a share of the
cores of its GPU's NUMA node. The rest is for the rollout driver, the reward workers and colocated
servers, which would otherwise run on the cores of the rank that started them.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from pacs_megatron.config import RunConfig
from pacs_megatron.config.layout import ranks_to_start
from pacs_megatron.runtime.environment import visible_gpus
from pacs_megatron.runtime.run_folder import ATTEMPT_VARIABLE

ROLLOUT_CORES = "PACS_ROLLOUT_CORES"
"""Environment variable: cores of the rollout near each GPU, such as `6,7;14,15`. Set by a rank or
the process of a rollout node, read by the driver and by the start of servers.
"""
COLOCATED_PART = Fraction(1, 2)
"""Part of the cores for the rollout if servers share the trainer's GPUs. A server has three busy
processes, a rank two threads; they take turns.
"""
DRIVER_PART = Fraction(1, 4)
"""Part of the cores for the driver and the reward workers, on their node."""
_SYSTEM = Path("/sys")
_GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder of the driver with one folder for each GPU, by PCI address, the order of nvidia-smi."""


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: numbers of its hardware threads, and its NUMA node."""

    threads: tuple[int, ...]
    numa_node: int


def allowed_cores(system: Path = _SYSTEM) -> list[Core]:
    """The physical cores that this process may use."""
    allowed = os.sched_getaffinity(0)
    cores: dict[tuple[int, ...], int] = {}
    for number in sorted(allowed):
        folder = system / "devices" / "system" / "cpu" / f"cpu{number}"
        siblings = folder / "topology" / "thread_siblings_list"
        threads = {number}
        if siblings.is_file():
            threads |= _numbers(siblings.read_text()) & allowed
        nodes = sorted(folder.glob("node[0-9]*"))
        cores[tuple(sorted(threads))] = int(nodes[0].name.removeprefix("node")) if nodes else 0
    return [Core(threads, numa_node) for threads, numa_node in cores.items()]


def _numbers(text: str) -> set[int]:
    """The numbers of a list of the kernel, such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def gpu_numa_nodes(gpus: Path = _GPUS, system: Path = _SYSTEM) -> dict[str, int]:
    """NUMA node of each GPU, by its number and by its UUID; without those that the kernel does not
    know.
    """
    nodes: dict[str, int] = {}
    for number, folder in enumerate(sorted(gpus.glob("*:*"))):
        file = system / "bus" / "pci" / "devices" / folder.name.lower() / "numa_node"
        if not file.is_file():
            continue
        node = int(file.read_text())
        if node < 0:
            continue
        nodes[str(number)] = node
        uuid = re.search(r"GPU-[\w-]+", (folder / "information").read_text())
        if uuid:
            nodes[uuid[0]] = node
    return nodes


def divide(cores: Sequence[Core], near: Sequence[int | None]) -> list[list[Core]]:
    """The cores of each GPU, all in turns if there are fewer cores than GPUs.

    Args:
        cores: of the node.
        near: NUMA node of each GPU; None: unknown, or it has no cores here.

    Returns:
        For each GPU its part of the cores of its NUMA node, or of all cores if a node is unknown.
    """
    known = {core.numa_node for core in cores}
    if any(node not in known for node in near):
        near = [None] * len(near)
    shares = []
    for place, node in enumerate(near):
        here = [core for core in cores if node is None or core.numa_node == node]
        sharing = [other for other, its_node in enumerate(near) if its_node == node]
        index = sharing.index(place)
        first = index * len(here) // len(sharing)
        end = (index + 1) * len(here) // len(sharing)
        shares.append(here[first : max(end, first + 1)])
    return shares


def split(share: Sequence[Core], part: Fraction) -> tuple[set[int], set[int]]:
    """(threads of the rank, threads of the rollout) near one GPU.

    A share of too few cores belongs to both.
    """
    count = int(len(share) * part)
    rank = share[: len(share) - count]
    rollout = share[len(rank) :] if count else share
    return _threads(rank), _threads(rollout)


def _threads(cores: Iterable[Core]) -> set[int]:
    threads: set[int] = set()
    return threads.union(*(core.threads for core in cores))


def binds(config: RunConfig, environ: Mapping[str, str]) -> bool:
    """Whether the processes of this run choose their cores: on GPUs, and in batch scripts.

    Not where srun bound them (`cpu_bind` of the cluster's file).
    """
    kind = environ.get("SLURM_CPU_BIND_TYPE", "").rstrip(":")
    is_alone = config.resources.gpus_per_node > 0 or ATTEMPT_VARIABLE in environ
    return is_alone and kind in ("", "none")


def bind_rank(config: RunConfig, rank: int, local_rank: int, ranks_here: int) -> None:
    """Binds this process, a rank, to its cores, and publishes those of the rollout.

    Args:
        config: of the run.
        rank: of this process.
        local_rank: its number on this node, and that of its GPU.
        ranks_here: number of ranks on this node.
    """
    if not binds(config, os.environ):
        return
    part = Fraction(0)
    if rank < ranks_here:
        part = DRIVER_PART
    if config.rollout.on_trainer_gpus:
        part = COLOCATED_PART
    shares = [split(share, part) for share in _shares(ranks_here)]
    _publish(rollout for _, rollout in shares)
    own, _ = shares[local_rank]
    os.sched_setaffinity(0, own)


def publish_server_cores(config: RunConfig, num_gpus: int) -> None:
    """Publishes the cores of this node's servers, for the process that starts them.

    Args:
        config: of the run.
        num_gpus: GPUs of the servers on this node; without GPUs the number of servers.
    """
    if not binds(config, os.environ):
        return
    part = Fraction(1)
    if config.rollout.on_trainer_gpus:
        # The same shares as those of the ranks.
        part = COLOCATED_PART
        num_gpus = ranks_to_start(config) // config.resources.nodes
    _publish(split(share, part)[1] for share in _shares(num_gpus))


def _shares(num_places: int) -> list[list[Core]]:
    visible = visible_gpus(os.environ) or [str(number) for number in range(num_places)]
    nodes = gpu_numa_nodes()
    near = [nodes.get(name) for name in visible[:num_places]]
    near += [None] * (num_places - len(near))
    return divide(allowed_cores(), near)


def _publish(cores: Iterable[set[int]]) -> None:
    texts = [",".join(map(str, sorted(numbers))) for numbers in cores]
    os.environ[ROLLOUT_CORES] = ";".join(texts)


def rollout_cores(places: Sequence[int] | None = None) -> set[int] | None:
    """The published cores near these GPUs, or near all; None if nothing was published.

    Args:
        places: numbers of GPUs of this node as the trainer counts them.
    """
    text = os.environ.get(ROLLOUT_CORES)
    if not text:
        return None
    near = [{int(number) for number in part.split(",")} for part in text.split(";")]
    if places is not None:
        near = [near[place % len(near)] for place in places]
    cores: set[int] = set()
    return cores.union(*near)


def bind_to_rollout_cores() -> None:
    """Binds this process, the driver, and all that it starts."""
    cores = rollout_cores()
    if cores is not None:
        os.sched_setaffinity(0, cores)
