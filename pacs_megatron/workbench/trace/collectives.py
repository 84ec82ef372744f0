"""Collectives of a rank in a world of fake process groups: recorded, never sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from pacs_megatron.workbench.trace.cuda import call_site

if TYPE_CHECKING:
    from pacs_megatron.workbench.trace.exchange import Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One call of a collective, a send or a receive."""

    operation: str
    backend: str
    """that the program wants: nccl or gloo"""
    ranks: tuple[int, ...]
    """global ranks of the group"""
    group: str
    """name of the group, the same on all ranks; groups of the same ranks have different names"""
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
    root: int | None = None
    """number in the group of the rank whose data a broadcast sends"""

    @property
    def name(self) -> str:
        """The operation without c10d's underscores."""
        return self.operation.strip("_")

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that all ranks of the call must have in common."""
        if self.peer is not None:
            return "message", self.dtype, self.num_bytes, self.device
        num_bytes = None if self.name.startswith("alltoall") else self.num_bytes
        return self.name, self.dtype, num_bytes, self.device, self.root

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
        self.exchange: Exchange | None = None
        """with the other ranks, if they exist"""
        self.reduce_op = dist.ReduceOp.SUM
        """of the last reduction"""
        self._is_async = False
        self._unfinished: Callable[[], None] | None = None
        """end of the asynchronous collective that was called last"""
        self.backends: dict[str, str] = {}
        """name of a group -> the backend that the program wants"""

    def record(self, func: Any, args: Sequence[Any], kwargs: Any) -> Collective:
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
        name = ""
        if group is not None:
            name = group.group_name
            backend = self.backends.get(name, "nccl")
            ranks = tuple(dist.get_process_group_ranks(group))

        device = tensors[0].device.type if tensors else "cpu"
        peer = ranks[args[2]] if operation in ("send", "recv_") else None
        root = args[2] if operation == "broadcast_" else None
        call = Collective(
            operation=operation,
            backend=backend,
            ranks=ranks,
            group=name,
            num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "none",
            device=device,
            phase=self.phase,
            place=call_site(),
            peer=peer,
            root=root,
        )
        self.calls.append(call)
        has_host_tensor = any(tensor.device.type != "cuda" for tensor in tensors)
        if backend == "nccl" and operation != "barrier" and has_host_tensor:
            raise BackendError(f"{operation} of a CPU tensor over nccl at {call.place}")
        return call

    def meet_objects(
        self, operation: str, group: dist.ProcessGroup | None, value: Any
    ) -> list[Any]:
        """Records a collective of Python objects, whose sizes are not known.

        Returns:
            The objects of all ranks of the group; this rank's own if the others do not exist.
        """
        members = group or dist.group.WORLD
        assert members is not None
        ranks = tuple(dist.get_process_group_ranks(members))
        call = Collective(
            operation=operation,
            backend="gloo",
            ranks=ranks,
            group=members.group_name,
            num_bytes=0,
            dtype="object",
            device="cpu",
            phase=self.phase,
            place=call_site(),
        )
        self.calls.append(call)
        if self.exchange is None:
            return [value] * len(ranks)
        return self.exchange.meet(call, value)

    def complete(self, finish: Callable[[], None]) -> None:
        """Completes a collective of host tensors: now, or in the `wait` of an asynchronous one."""
        if self._is_async:
            self._unfinished = finish
        else:
            finish()

    def run_async(self, call: Callable[[], Any]) -> Any:
        """The handle of an asynchronous collective that `call` starts."""
        self._is_async = True
        try:
            work = call()
        finally:
            self._is_async = False
        finish = self._unfinished
        self._unfinished = None
        return work if finish is None else _Unfinished(finish)

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


class _Unfinished:
    """The handle of a collective whose result arrives in `wait`."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self, *_args: object) -> None:
        finish = self._finish
        self._finish = None
        if finish is not None:
            finish()


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
    _fake_object_collectives(trace, rank)
    _follow_reductions(trace)


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


def _fake_object_collectives(trace: CollectiveTrace, rank: int) -> None:
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = trace.meet_objects("all_gather_object", group, obj)

    def broadcast_object_list(
        object_list: list[Any], src: int = 0, group: Any = None, **_options: Any
    ) -> None:
        shares = trace.meet_objects("broadcast_object_list", group, list(object_list))
        object_list[:] = shares[_number_in(group, src)]

    def gather_object(
        obj: Any, object_gather_list: Any = None, *_args: Any, group: Any = None, **_options: Any
    ) -> None:
        shares = trace.meet_objects("gather_object", group, obj)
        if object_gather_list is not None:
            object_gather_list[:] = shares

    def scatter_object_list(
        scatter_object_output_list: Any,
        scatter_object_input_list: Any = None,
        src: int = 0,
        group: Any = None,
        **_options: Any,
    ) -> None:
        shares = trace.meet_objects("scatter_object_list", group, scatter_object_input_list)
        of_source = shares[_number_in(group, src)]
        own = None
        if of_source is not None:
            own = of_source[_number_in(group, rank)]
        scatter_object_output_list[0] = own

    _replace("all_gather_object", all_gather_object)
    _replace("broadcast_object_list", broadcast_object_list)
    _replace("gather_object", gather_object)
    _replace("scatter_object_list", scatter_object_list)


def _number_in(group: dist.ProcessGroup | None, rank: int) -> int:
    """Number of a global rank in a group."""
    return dist.get_process_group_ranks(group or dist.group.WORLD).index(rank)


def _follow_reductions(trace: CollectiveTrace) -> None:
    """Remembers the operation of each reduction: the dispatcher passes it as a closed box."""
    real_all_reduce = dist.all_reduce

    def all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **options: Any
    ) -> Any:
        trace.reduce_op = op
        if options.get("async_op"):
            return trace.run_async(lambda: real_all_reduce(tensor, op, *args, **options))
        return real_all_reduce(tensor, op, *args, **options)

    _replace("all_reduce", all_reduce)


def _replace(name: str, function: Any) -> None:
    setattr(dist, name, function)
    setattr(dist.distributed_c10d, name, function)
