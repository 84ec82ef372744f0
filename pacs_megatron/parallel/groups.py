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
    """The position of this process on every axis."""

    rank: int
    layout: Layout
    dp: int
    tp: int
    pp: int
    ep: int
    device: torch.device
    control: (
        dist.ProcessGroup
    )  # gloo over all ranks, for decisions and host buffers; has its own long timeout
    model_parallel: (
        dist.ProcessGroup
    )  # gloo over the tp x pp x cp ranks of this data-parallel replica
    model_parallel_ranks: tuple[int, ...]
    """global ranks of `model_parallel`; the first is the head, which receives the tokens of the
    replica
    """
    heads: tuple[int, ...]  # global rank of every replica's head, by data-parallel rank

    @property
    def is_head(self) -> bool:
        """Whether this is the first rank of its replica, which receives the replica's share of a
        step.
        """
        return self.rank == self.model_parallel_ranks[0]


def started_place() -> RankPlace:
    """The place of this process among the ranks of torchrun or srun, or alone without an address."""
    return find_rank(os.environ) or RankPlace(0, 1, 0, 1, "", 0)


def _rendezvous(place: RankPlace, backend: str) -> None:
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

    Raises ConfigError if the number of started ranks does not fit the layout, ConnectError if the
    ranks cannot connect.
    """
    if layout.world_size % layout.model_parallel_size:
        raise ConfigError(
            f"world size {layout.world_size} is not a multiple of parallel.tp*pp*cp = "
            f"{layout.tp}*{layout.pp}*"
            f"{layout.cp} = {layout.model_parallel_size}; start a multiple of "
            f"{layout.model_parallel_size} ranks"
        )
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
    # Megatron numbers the ranks by tp, cp, dp, pp, the first fastest.
    dp_of_rank = [rank // (layout.tp * layout.cp) % layout.dp for rank in range(layout.world_size)]
    replicas = [
        [rank for rank, dp in enumerate(dp_of_rank) if dp == replica]
        for replica in range(layout.dp)
    ]
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


@contextlib.contextmanager
def _connecting(place: RankPlace) -> Iterator[None]:
    """Converts the errors of stores, gloo and NCCL, which have no exception classes, to
    ConnectError.
    """
    address = f"{place.master_addr}:{place.master_port}" if place.master_addr else "this process"
    try:
        with report_wait(f"for {place.world_size} ranks to connect to {address}"):
            yield
    except RuntimeError as error:
        raise ConnectError(
            f"the {place.world_size} ranks cannot connect to {address}", error
        ) from error


def with_own_control(rank: Rank, timeout_s: float) -> Rank:
    """`rank` with another control group, for a thread: collectives of two threads need two groups.

    Collective.
    """
    return replace(
        rank, control=dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
    )


def shutdown(*, keep_world: bool = False) -> None:
    """Destroys all groups after a normal end; `keep_world`: but the one of all ranks, for
    `initialize` with another layout. Must not be called after an exception in a rank.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized() and not keep_world:
        dist.destroy_process_group()
