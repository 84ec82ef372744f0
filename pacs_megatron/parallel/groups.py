"""Process groups of a Layout.

Only this module initializes `torch.distributed` and Megatron's parallel state.
"""

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from pacs_megatron.contracts import Layout
from pacs_megatron.errors import ConfigError, ConnectError
from pacs_megatron.parallel import cpu_redirects
from pacs_megatron.runtime.environment import RankPlace, find_rank
from pacs_megatron.runtime.waiting import report_wait

_STARTUP_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The position of this process on every axis, and its process groups."""

    rank: int
    """global rank"""
    layout: Layout
    dp: int
    tp: int
    pp: int
    ep: int
    device: torch.device
    control: dist.ProcessGroup
    """gloo over all ranks, for decisions and host buffers, with its own long timeout"""
    model_parallel: dist.ProcessGroup
    """gloo over the tp x pp x cp ranks of this data-parallel replica"""
    model_parallel_ranks: tuple[int, ...]
    """global ranks of `model_parallel`; the first is the head of the replica"""
    heads: tuple[int, ...]
    """global rank of every replica's head, by data-parallel rank"""

    @property
    def is_head(self) -> bool:
        """Whether this is the first rank of its replica, which receives the replica's tokens."""
        return self.rank == self.model_parallel_ranks[0]


def started_place() -> RankPlace:
    """The place of this process among the ranks of torchrun or srun.

    A process that neither of them started is rank 0 of 1, without an address.
    """
    place = find_rank(os.environ)
    if place is not None:
        return place
    return RankPlace(
        rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="", master_port=0
    )


def _rendezvous(place: RankPlace, backend: str) -> None:
    """Connects all ranks, and so creates torch's default process group. Collective."""
    num_nodes = os.environ.get("GROUP_WORLD_SIZE", os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if backend == "gloo" and int(num_nodes) == 1:
        # One host: all connections use loopback. The host name may resolve to another interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    timeout = datetime.timedelta(seconds=_STARTUP_TIMEOUT_S)
    if place.master_addr:
        os.environ.update(place.variables())
        dist.init_process_group(backend, timeout=timeout)
    else:
        # A store in memory, because a single process needs no port.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def initialize(layout: Layout, *, seed: int, control_timeout_s: float) -> Rank:
    """Creates every process group of `layout` and seeds Megatron's generators.

    Collective; once per process.

    Args:
        layout: sizes of the parallel axes, for the ranks that were started.
        seed: of Megatron's generators.
        control_timeout_s: seconds that a rank may wait in the control group.

    Raises:
        ConfigError: if the number of started ranks does not fit the layout.
        ConnectError: if the ranks cannot connect.
    """
    size = layout.model_parallel_size
    if layout.world_size % size:
        raise ConfigError(
            f"world size {layout.world_size} is not a multiple of parallel.tp*pp*cp = "
            f"{layout.tp}*{layout.pp}*{layout.cp} = {size}; start a multiple of {size} ranks"
        )

    # This runs before the first import of Megatron, which must not find optimizers that need CUDA.
    on_cpu = cpu_redirects.install()
    from megatron.core import parallel_state, tensor_parallel

    place = started_place()
    if place.world_size != layout.world_size:
        raise ConfigError(
            f"{place.world_size} ranks were started but the layout has {layout.world_size}"
        )

    device = torch.device("cpu")
    if not on_cpu:
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)

    replicas = _replicas(layout)
    with _connecting(place):
        if not dist.is_initialized():
            _rendezvous(place, "gloo" if on_cpu else "nccl")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.expert_tp,
            create_gloo_process_groups=False,
        )
        timeout = datetime.timedelta(seconds=control_timeout_s)
        control = dist.new_group(backend="gloo", timeout=timeout)
        model_parallel, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            replicas, timeout=timeout, backend="gloo"
        )

    dp_rank = parallel_state.get_data_parallel_rank()
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=on_cpu)
    return Rank(
        rank=place.rank,
        layout=layout,
        dp=dp_rank,
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        device=device,
        control=control,
        model_parallel=model_parallel,
        model_parallel_ranks=tuple(replicas[dp_rank]),
        heads=tuple(ranks[0] for ranks in replicas),
    )


def _replicas(layout: Layout) -> list[list[int]]:
    """Global ranks of each data-parallel replica, ascending."""
    # Megatron numbers the ranks by tp, cp, dp, pp, the first fastest.
    ranks_before_dp = layout.tp * layout.cp
    replicas: list[list[int]] = [[] for _ in range(layout.dp)]
    for rank in range(layout.world_size):
        replicas[rank // ranks_before_dp % layout.dp].append(rank)
    return replicas


@contextlib.contextmanager
def _connecting(place: RankPlace) -> Iterator[None]:
    """Converts the errors of stores, gloo and NCCL to ConnectError.

    They have no exception classes of their own: all are RuntimeError.
    """
    address = "this process"
    if place.master_addr:
        address = f"{place.master_addr}:{place.master_port}"
    try:
        with report_wait(f"for {place.world_size} ranks to connect to {address}"):
            yield
    except RuntimeError as error:
        raise ConnectError(
            f"the {place.world_size} ranks cannot connect to {address}", error
        ) from error


def with_own_control(rank: Rank, timeout_s: float) -> Rank:
    """`rank` with a control group of its own, for a thread. Collective.

    Two threads need two groups, because ranks must call the collectives of a group in one order.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    return replace(rank, control=dist.new_group(backend="gloo", timeout=timeout))


def shutdown(*, keep_world: bool = False) -> None:
    """Destroys all process groups after a normal end.

    Must not be called after an exception in a rank.

    Args:
        keep_world: keep torch's default group, for `initialize` with another layout.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized() and not keep_world:
        dist.destroy_process_group()
