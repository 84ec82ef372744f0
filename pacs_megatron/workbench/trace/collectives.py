"""Collectives of a rank in a world of fake process groups: recorded, never sent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from pacs_megatron.workbench.trace.cuda import call_site


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One call of a collective, a send or a receive."""

    operation: str
    backend: str
    """that the program wants: nccl or gloo"""
    ranks: tuple[int, ...]
    """global ranks of the group"""
    num_bytes: int
    """of all tensors of the call"""
    dtype: str
    """of the first tensor, or `object`"""
    device: str
    phase: str
    place: str
    """file:line of the innermost callers"""
    peer: int | None = None
    """global rank of the other side of a send or a receive"""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


class BackendError(RuntimeError):
    """A tensor on a device that the group's backend cannot send."""


class CollectiveTrace:
    """The calls of this rank, in order."""

    def __init__(self) -> None:
        self.calls: list[Collective] = []
        self.phase = ""
        self.backends: dict[str, str] = {}
        """name of a group -> the backend that the program wants"""

    def record(self, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Records a c10d operation.

        Raises BackendError for a CPU tensor over nccl, as NCCL does.
        """
        operation = str(func).split(".")[1]
        group = _group_of(args, kwargs)
        tensors = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        backend = "nccl"
        ranks: tuple[int, ...] = ()
        if group is not None:
            backend = self.backends.get(group.group_name, "nccl")
            ranks = tuple(dist.get_process_group_ranks(group))

        device = tensors[0].device.type if tensors else "cpu"
        peer = ranks[args[2]] if operation in ("send", "recv_") else None
        call = Collective(
            operation=operation,
            backend=backend,
            ranks=ranks,
            num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "none",
            device=device,
            phase=self.phase,
            place=call_site(),
            peer=peer,
        )
        self.calls.append(call)
        has_host_tensor = any(tensor.device.type != "cuda" for tensor in tensors)
        if backend == "nccl" and operation != "barrier" and has_host_tensor:
            raise BackendError(f"{operation} of a CPU tensor over nccl at {call.place}")

    def record_objects(self, operation: str, group: dist.ProcessGroup | None) -> None:
        """Records a collective of Python objects, whose sizes are not known."""
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        self.calls.append(
            Collective(
                operation=operation,
                backend="gloo",
                ranks=ranks,
                num_bytes=0,
                dtype="object",
                device="cpu",
                phase=self.phase,
                place=call_site(),
            )
        )

    @staticmethod
    def group_size(args: Sequence[Any], kwargs: Any) -> int:
        """Number of ranks of the group of a c10d operation."""
        group = _group_of(args, kwargs)
        return 1 if group is None else group.size()

    @staticmethod
    def finished() -> Any:
        """The handle of a collective that is done."""
        from torch._C._distributed_c10d import FakeWork

        return FakeWork().boxed()


def _group_of(args: Sequence[Any], kwargs: Any) -> dist.ProcessGroup | None:
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.ScriptObject):
            return dist.ProcessGroup.unbox(leaf)
    return None


def join_fake_world(trace: CollectiveTrace, rank: int, world_size: int, per_node: int) -> None:
    """Makes this process rank `rank` of a world whose other ranks do not exist.

    Later groups are fake too, of any backend, which `trace.backends` remembers.
    """
    import torch.distributed._tools.fake_collectives  # noqa: F401  (registers fake kernels)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % per_node),
        LOCAL_WORLD_SIZE=str(min(world_size, per_node)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    _fake_new_groups(trace)
    _fake_object_collectives(trace)


def _fake_new_groups(trace: CollectiveTrace) -> None:
    real_new_group = dist.new_group

    def new_group(*args: Any, **options: Any) -> Any:
        options.pop("pg_options", None)
        backend = options.get("backend") or "nccl"
        options["backend"] = "fake"
        group = real_new_group(*args, **options)
        if isinstance(group, dist.ProcessGroup):
            trace.backends[group.group_name] = backend
        return group

    _replace("new_group", new_group)


def _fake_object_collectives(trace: CollectiveTrace) -> None:
    def all_gather_object(gathered: list[Any], sent: Any, group: Any = None) -> None:
        gathered[:] = [sent] * dist.get_world_size(group)
        trace.record_objects("all_gather_object", group)

    def broadcast_object_list(*_args: Any, group: Any = None, **_options: Any) -> None:
        trace.record_objects("broadcast_object_list", group)

    def gather_object(
        obj: Any, object_gather_list: Any = None, *_args: Any, group: Any = None, **_options: Any
    ) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)
        trace.record_objects("gather_object", group)

    def scatter_object_list(
        scatter_object_output_list: Any,
        scatter_object_input_list: Any = None,
        *_args: Any,
        group: Any = None,
        **_options: Any,
    ) -> None:
        scatter_object_output_list[0] = (scatter_object_input_list or [None])[0]
        trace.record_objects("scatter_object_list", group)

    _replace("all_gather_object", all_gather_object)
    _replace("broadcast_object_list", broadcast_object_list)
    _replace("gather_object", gather_object)
    _replace("scatter_object_list", scatter_object_list)


def _replace(name: str, function: Any) -> None:
    setattr(dist, name, function)
    setattr(dist.distributed_c10d, name, function)
