"""The dispatch mode of fake CUDA: CUDA tensors have a shape and no memory, CPU tensors are real.

An operation without a CUDA tensor runs as it is, so all host code of the product is real. Of an
operation with CUDA tensors only the shapes are computed. Small tensors that came from the host
(token ids, bounds, routes, labels) keep a real copy, the shadow, through every operation whose
inputs all have one; so `.tolist()`, `nonzero` and sizes of messages are exact. Any other value that
goes to the host is 0, and is counted with its place.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from pacs_megatron.workbench.trace.collectives import Collective, CollectiveTrace
from pacs_megatron.workbench.trace.cuda import DEVICE, call_function, call_site
from pacs_megatron.workbench.trace.exchange import Exchange
from pacs_megatron.workbench.trace.ledger import Label, Ledger

aten = torch.ops.aten

SHADOW_ELEMENTS = 1 << 23
"""largest integer or boolean tensor with a shadow"""
FLOAT_SHADOW_ELEMENTS = 1 << 16
"""largest floating-point tensor with a shadow: values of samples, not of tokens"""

_TAKES_BOTH_DEVICES = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.equal.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
}
"""operations that accept tensors of both devices on a GPU too"""

_INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}

_FILLED = {
    "zeros_like": 0,
    "new_zeros": 0,
    "ones_like": 1,
    "new_ones": 1,
}
"""factories whose value follows from their name"""


class DeviceMixError(RuntimeError):
    """A CPU tensor among CUDA tensors, where a GPU would raise or read a wrong address."""


class Work:
    """Floating-point operations, bytes and kernels of each phase."""

    def __init__(self) -> None:
        self.flops: Counter[str] = Counter()
        self.moved_bytes: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.host_to_device_bytes: Counter[str] = Counter()
        self.by_kernel: Counter[tuple[str, str, float, int]] = Counter()
        """number of kernels by (phase, operation, FLOPs, bytes)"""

    def add(
        self, phase: str, operation: str, flops: float, num_bytes: int, kernels: int = 1
    ) -> None:
        """Counts an operation, whose work several equal kernels may share."""
        self.flops[phase] += int(flops)
        self.moved_bytes[phase] += num_bytes
        self.kernels[phase] += kernels
        shared = (flops / kernels, num_bytes // kernels)
        self.by_kernel[phase, operation, *shared] += kernels


class FakeCuda(FakeTensorMode):  # type: ignore[no-untyped-call]
    """See the module. One per process; `with` it, every operation of the process passes here."""

    avoid_device_init = True  # torch.tensor(..., device="cuda") is made on the CPU, then moved

    def __init__(self, collectives: CollectiveTrace) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.collectives = collectives
        self.ledger = Ledger()
        self.work = Work()
        self.phase = ""
        self.modules: list[str] = []
        """paths of the modules whose forward runs, innermost last"""
        self.kernel = ""
        """name of the compiled kernel whose outputs are allocated; empty for torch's operations"""
        self.invented: Counter[str] = Counter()
        """values that went to the host without a shadow, by place"""
        self.unknown_shapes: Counter[str] = Counter()
        self.host_syncs: Counter[tuple[str, str, str, str]] = Counter()
        """operations that wait for the GPU, by (phase, operation, file:line, file:function)"""
        self.hidden_shape: tuple[int, int, int] | None = None
        """shape of the hidden states that a neighbour of the pipeline sends"""
        self._depth = 0

    # ----------------------------------------------------------------------------- bookkeeping
    def start_phase(self, name: str) -> None:
        """Begins the phase `name`."""
        self.phase = name
        self.collectives.phase = name
        self.ledger.start_phase(name)

    def count_wait(self, operation: str) -> None:
        """Counts an operation for which the host waits for the GPU."""
        self.host_syncs[self.phase, operation, call_site(limit=1), call_function()] += 1

    def empty(self, shape: Sequence[int], dtype: torch.dtype, operation: str = "empty") -> Any:
        """A new fake CUDA tensor, counted."""
        options = {"dtype": dtype, "device": DEVICE, "pin_memory": False}
        tensor: Any = super().dispatch(aten.empty.memory_format, (), (list(shape),), options)
        self._count_memory(tensor, operation)
        return tensor

    def shadow(self, tensor: Any) -> Any:
        """The real values of a tensor, or None."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        awaited = getattr(tensor, "_awaited", None)
        if awaited is not None:
            awaited()
        return getattr(tensor, "_shadow", None)

    def set_shadow(self, tensor: Any, values: torch.Tensor | None) -> None:
        """Real values of a fake tensor; no shadow for None or too many."""
        has_shadow = values is not None and _may_have_shadow(values)
        tensor._shadow = values if has_shadow else None
        tensor._awaited = None

    def _count_memory(self, tensor: torch.Tensor, operation: str) -> None:
        module = self.modules[-1] if self.modules else ""
        self.ledger.add(tensor, Label(self.phase, module, self.kernel or operation))

    # -------------------------------------------------------------------------------- dispatch
    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)

        tensors = _tensors((args, kwargs))
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        device = kwargs.get("device")
        target = None if device is None else torch.device(device).type
        if not fakes and target != "cuda":
            return func(*args, **kwargs)  # the host's work, really
        if func is aten.record_stream.default:
            return None
        if func.namespace == "prim":  # a query of the device
            return super().dispatch(func, types, args, kwargs)

        self._check_devices(func, args, tensors)
        wait = _wait_of(func, args, kwargs, target)
        if wait is not None:
            self.count_wait(wait)
        if func is aten._local_scalar_dense.default:
            return self._to_host(args[0], (), args[0].dtype).item()
        if func is aten._to_copy.default and target == "cpu":
            dtype = kwargs.get("dtype") or args[0].dtype
            return self._to_host(args[0], tuple(args[0].shape), dtype)
        if func is aten._to_copy.default and target == "cuda" and not fakes:
            return self._from_host(args[0], kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            return func(args[0], self._to_host(args[1], tuple(args[1].shape), args[0].dtype))
        if func is aten.equal.default:
            return self._equal(*args[:2])
        if func in (aten.set_.source_Storage, aten.set_.source_Storage_storage_offset):
            return self._run(func, types, args, kwargs)
        return self._compute(func, types, args, kwargs)

    def _check_devices(
        self, func: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Raises DeviceMixError for a CPU tensor with dimensions among CUDA tensors.

        FakeTensorMode is not as strict: it decomposes index_copy, for instance, into operations
        that accept an index on the host.
        """
        if func in _INDEXING:
            # A GPU takes an index on the host, but the host none on the GPU.
            self_on_host = args[0].device.type == "cpu"
            tensors = _tensors(args) if self_on_host else []
        elif func in _TAKES_BOTH_DEVICES:
            return
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.dim()]
        on_gpu = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        if on_host and on_gpu:
            raise DeviceMixError(
                f"{func}: a CPU tensor {list(on_host[0].shape)} among CUDA tensors at {call_site()}"
            )

    def _compute(self, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """An operation whose result stays on the fake GPU."""
        tensors = _tensors((args, kwargs))
        is_known = bool(tensors) and all(self.shadow(tensor) is not None for tensor in tensors)

        tags = func.tags
        if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            if is_known:
                return self._fakes_of(self._on_shadows(func, args, kwargs))
            if func is aten.masked_select.default and self.shadow(args[1]) is not None:
                count = int(self.shadow(args[1]).expand(args[0].shape).sum())
                return self.empty((count,), args[0].dtype, str(func))
            self.unknown_shapes[f"{func} at {call_site()}"] += 1
            return super().dispatch(func, types, args, kwargs)

        if func is aten.index.Tensor:
            args = (args[0], self._without_masks(args[1]))
        out = self._run(func, types, args, kwargs)
        if func is aten.topk.default and not is_known and args[0].dim() == 2:
            self._balance(out[1], args[0].shape, args[1])
        else:
            self._follow(func, args, kwargs, out, is_known=is_known)
        return out

    def _run(self, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """The shapes of the operation, its memory and its work."""
        if func is aten.addmm.dtype_out:  # torch 2.11 cannot decompose it; `out` exists already
            flops = 2 * args[1].numel() * args[2].shape[1]
            self.work.add(self.phase, str(func), flops, _num_bytes([*args[1:3], kwargs["out"]]))
            return kwargs["out"]

        self._depth += 1
        try:
            out = super().dispatch(func, types, args, kwargs)
        finally:
            self._depth -= 1
        if self._depth:
            return out  # a part of a decomposed operation, which is one kernel on a GPU

        if not _is_view(func, args, kwargs, out):
            for tensor in _tensors(out):
                if isinstance(tensor, FakeTensor) and tensor.device.type == "cuda":
                    self._count_memory(tensor, str(func))
            self._count_work(func, args, kwargs, out)
        return out

    def _count_work(self, func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        operation = str(func)
        if operation.startswith("aten.empty"):
            return
        flops = 0.0
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            plain = [value for value in args if not isinstance(value, torch.dtype)]
            options = {
                name: value for name, value in kwargs.items() if name not in ("out", "out_dtype")
            }
            flops = count(*plain, **options, out_val=out)
        fakes = [
            tensor for tensor in _tensors((args, kwargs, out)) if isinstance(tensor, FakeTensor)
        ]
        self.work.add(self.phase, operation, flops, _num_bytes(fakes))

    # --------------------------------------------------------------------------------- shadows
    def _from_host(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        out = self.empty(tensor.shape, dtype)
        if _may_have_shadow(out):
            self.set_shadow(out, tensor.detach().to(dtype).clone())
        self.work.host_to_device_bytes[self.phase] += _num_bytes([out])
        return out

    def _to_host(self, tensor: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        shadow = self.shadow(tensor)
        if shadow is not None:
            values: torch.Tensor = shadow.to(dtype).clone().reshape(shape)
            return values
        self.invented[f"{tuple(tensor.shape)} {tensor.dtype} at {call_site()}"] += 1
        return torch.zeros(tuple(shape), dtype=dtype)

    def _equal(self, left: Any, right: Any) -> bool:
        shadows = (self.shadow(left), self.shadow(right))
        if shadows[0] is not None and shadows[1] is not None:
            return torch.equal(*shadows)
        self.invented[f"torch.equal at {call_site()}"] += 1
        return True

    def _balance(self, indices: Any, scores: Sequence[int], k: int) -> None:
        """Balanced experts for a router's top-k, whose scores have no values."""
        tokens, experts = scores
        chosen = (torch.arange(tokens)[:, None] * k + torch.arange(k)) % experts
        self.set_shadow(indices, chosen)
        self.invented[f"balanced top-{k} of {experts} at {call_site()}"] += 1

    def _on_shadows(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        options = dict(kwargs)
        if options.get("device") is not None:
            options["device"] = torch.device("cpu")
        real_args, real_options = pytree.tree_map(self.shadow, (args, options))
        return func(*real_args, **real_options)

    def _fakes_of(self, values: Any) -> Any:
        """Fake CUDA tensors with these values."""

        def fake_of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            tensor = self.empty(value.shape, value.dtype)
            self.set_shadow(tensor, value)
            return tensor

        return pytree.tree_map(fake_of, values)

    def _without_masks(self, indices: Sequence[Any]) -> list[Any]:
        """Boolean masks with a shadow as indices."""
        without: list[Any] = []
        for index in indices:
            mask = None if index is None else self.shadow(index)
            if mask is not None and mask.dtype == torch.bool:
                without.extend(self._fakes_of(list(mask.nonzero(as_tuple=True))))
            else:
                without.append(index)
        return without

    def _follow(
        self, func: Any, args: Sequence[Any], kwargs: Any, out: Any, *, is_known: bool
    ) -> None:
        """Shadows of the outputs where they follow from those of the inputs; otherwise a tensor
        that the operation changes loses its own.
        """
        outs = [tensor for tensor in _tensors(out) if isinstance(tensor, FakeTensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_small = all(_may_have_shadow(tensor) for tensor in outs)
        name = str(func).split(".")[1]

        if not is_known and name in _FILLED and out.numel() <= SHADOW_ELEMENTS:
            # One value for all elements: of any dtype, and without memory.
            out._shadow = torch.tensor(_FILLED[name], dtype=out.dtype).expand(out.shape)
            return
        is_factory = not _tensors((args, kwargs)) and "empty" not in name
        if is_random or not is_small or not (is_known or is_factory):
            self._forget_changed(func, args)
            return

        try:
            values = self._on_shadows(func, args, kwargs)
        except RuntimeError:
            # A view of a part of a larger storage, of which the shadow has this part only.
            self._forget_changed(func, args)
            return
        pairs = zip(pytree.tree_leaves(out), pytree.tree_leaves(values), strict=True)
        for tensor, value in pairs:
            if isinstance(tensor, FakeTensor) and isinstance(value, torch.Tensor):
                self.set_shadow(tensor, value)

    def _forget_changed(self, func: Any, args: Sequence[Any]) -> None:
        if not func._schema.is_mutable:
            return
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if argument.is_write and isinstance(value, FakeTensor):
                self.set_shadow(value, None)

    # ----------------------------------------------------------------------------- collectives
    def _collective(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        call = self.collectives.record(func, args, kwargs)
        exchange = self.collectives.exchange
        if exchange is None:
            self._exchange_alone(call, args)
        else:
            self._exchange(exchange, call, args)
        work = self.collectives.finished()
        if len(func._schema.returns) == 1:
            return work
        return (args[0], work)

    def _exchange_alone(self, call: Collective, args: Sequence[Any]) -> None:
        """The result of a collective if every rank has this rank's data."""
        name = call.operation
        if name == "recv_" and self.hidden_shape is not None:
            # The number and the sizes of the dimensions, which a neighbour sends before the data.
            for out in args[0]:
                if isinstance(out, FakeTensor) and out.dtype == torch.int64 and out.numel() == 3:
                    self.set_shadow(out, torch.tensor(self.hidden_shape))
        elif name == "allgather_":
            for outs, sent in zip(args[0], args[1], strict=True):
                for out in outs:
                    self._receive(out, self.shadow(sent))
        elif name == "_allgather_base_":
            sent = self.shadow(args[1])
            if sent is not None:
                repeated = sent.reshape(1, -1).expand(len(call.ranks), -1)
                self._receive(args[0], repeated.reshape(args[0].shape))
        elif name == "alltoall_base_":
            sent = self.shadow(args[1])
            if sent is not None and sent.numel() == args[0].numel():
                self._receive(args[0], sent.reshape(args[0].shape))

    def _exchange(self, exchange: Exchange, call: Collective, args: Sequence[Any]) -> None:
        """The result of a collective with the values of all ranks, where the host can read them:
        of tensors on the host, and of integers on the GPU.
        """
        sent, received = _sides(call, args)
        if not _has_values([*sent, *received], call):
            return
        if call.operation == "recv_":
            ticket = exchange.receive(call)
        else:
            values = [self.shadow(tensor) for tensor in sent]
            arrays = [None if value is None else value.numpy() for value in values]
            ticket = exchange.post(call, arrays)
        if call.operation == "send":
            return
        reduce_op = self.collectives.reduce_op

        def finish() -> None:
            shares = exchange.wait(ticket)
            if call.operation == "recv_":
                shares = [shares]
            results: Sequence[torch.Tensor | None] = [None] * len(received)
            if all(value is not None for value in itertools.chain(*shares)):
                values = [[torch.from_numpy(value) for value in share] for share in shares]
                results = _combined(call, args, values, reduce_op)
            for out, result in zip(received, results, strict=True):
                self._receive(out, None if result is None else result.reshape(out.shape))

        if call.device == "cuda":
            # Calls on a GPU overlap, so the wait is where the host reads the values.
            for out in received:
                self.set_shadow(out, None)
                out._awaited = finish
        else:
            self.collectives.complete(finish)

    def _receive(self, out: Any, values: torch.Tensor | None) -> None:
        if isinstance(out, FakeTensor):
            self.set_shadow(out, None if values is None else values.detach().clone())
        elif values is not None:
            out.copy_(values)


def _has_values(tensors: Sequence[torch.Tensor], call: Collective) -> bool:
    """Whether the host can read the values of the call's tensors; the same on all ranks."""
    if call.operation == "barrier" or call.device == "cpu":
        return True
    return bool(tensors) and not tensors[0].is_floating_point()


def _sides(call: Collective, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The tensors that this rank sends, and those that it receives.

    Raises NotImplementedError for a collective of host tensors that the product does not use.
    """
    name = call.operation
    if name in ("allreduce_", "broadcast_"):
        return list(args[0]), list(args[0])
    if name == "send":
        return list(args[0]), []
    if name == "recv_":
        return [], list(args[0])
    if name == "allgather_":
        return list(args[1]), list(args[0][0])
    if name == "_allgather_base_":
        return [args[1]], [args[0]]
    if name == "barrier":
        return [], []
    if call.device == "cpu":
        raise NotImplementedError(f"a trace of all ranks has no {call.name} of host tensors")
    return [], []


def _combined(
    call: Collective, args: Sequence[Any], shares: Sequence[list[torch.Tensor]], reduce_op: Any
) -> list[torch.Tensor]:
    """The tensors that this rank receives.

    Args:
        call: the collective.
        args: of the operation.
        shares: the tensors that each rank of the group sends.
        reduce_op: of a reduction.
    """
    name = call.operation
    if name == "barrier":
        return []
    if name == "recv_":
        return shares[0]
    if name == "broadcast_":
        assert call.root is not None
        return shares[call.root]
    if name == "allgather_":
        return [share[0] for share in shares]
    if name == "_allgather_base_":
        return [torch.cat([share[0].reshape(-1) for share in shares])]

    stacked = torch.stack([share[0] for share in shares])
    if reduce_op == dist.ReduceOp.MAX:
        return [stacked.amax(0)]
    if reduce_op == dist.ReduceOp.MIN:
        return [stacked.amin(0)]
    assert reduce_op == dist.ReduceOp.SUM, reduce_op
    return [stacked.sum(0, dtype=stacked.dtype)]


def _wait_of(func: Any, args: Sequence[Any], kwargs: Any, target: str | None) -> str | None:
    """Name of the operation if the host waits in it for all earlier work of the GPU.

    A blocking copy waits in both directions (ATen/native/cuda/Copy.cu, `memcpy_and_sync`).
    """
    if func is aten._local_scalar_dense.default:
        return "item"
    if func is aten._to_copy.default:
        source = args[0].device.type
        wanted = source if target is None else target
        return None if kwargs.get("non_blocking") else _copy_name(source, wanted)
    if func is aten.copy_.default:
        options = {"non_blocking": args[2] if len(args) > 2 else False, **kwargs}
        is_async = options["non_blocking"]
        return None if is_async else _copy_name(args[1].device.type, args[0].device.type)
    if func is aten.index.Tensor:
        masks = (torch.bool, torch.uint8)
        has_mask = any(index is not None and index.dtype in masks for index in args[1])
        return "index by a mask" if has_mask else None
    has_unknown_size = torch.Tag.dynamic_output_shape in func.tags
    return str(func).split(".")[1] if has_unknown_size or func is aten.equal.default else None


def _copy_name(source: str, target: str) -> str | None:
    if source == target:
        return None
    return "copy to the host" if target == "cpu" else "copy to the GPU"


def _may_have_shadow(tensor: torch.Tensor) -> bool:
    limit = FLOAT_SHADOW_ELEMENTS if tensor.is_floating_point() else SHADOW_ELEMENTS
    return tensor.numel() <= limit


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)


def _is_view(func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> bool:
    """Whether the operation allocates nothing; operations of prims are not marked as views."""
    if func.is_view:
        return True
    if func._schema.is_mutable or not isinstance(out, FakeTensor):
        return False
    storage = out.untyped_storage()._cdata
    return any(
        isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata == storage
        for tensor in _tensors((args, kwargs))
    )
