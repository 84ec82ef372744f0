"""The trainer's state in host memory while colocated servers use the GPU.

A storage is copied to host memory and set to size 0, and later grown and filled again, so every view of it stays valid
(Megatron's buffers, the distributed optimizer's shards). Meanwhile the optimizer's tensors show the host copy, and
`readable` returns it for a weight: a checkpoint or an export while off-loaded reads host memory. A weight's own data stays
on the device, because another device would replace its gradient accumulator, which has Megatron's hooks
(`VariableHooks::set_data` in torch/csrc/autograd/variable.cpp).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, UntypedStorage

from pacs_megatron.config.schema import OffloadKind
from pacs_megatron.policy.optimizer import Optimizer
from pacs_megatron.policy.weights import complete, pin

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class _Moved:
    storage: UntypedStorage
    num_bytes: int
    offset: int
    """of its copy in the host buffer"""


class Offload:
    """`optimizer` moves fp32 weights and moments, and frees the gradients without a copy (each update overwrites them);
    `all` also moves the weights."""

    def __init__(
        self, kind: OffloadKind, chunks: list[DistributedDataParallel], optimizer: Optimizer, device: torch.device
    ) -> None:
        self._kind = kind
        self._chunks = chunks
        self._optimizer = optimizer
        self._device = device
        self.host = torch.empty(0, dtype=torch.uint8)
        self._moved: dict[int, _Moved] = {}
        self._freed: list[tuple[UntypedStorage, int]] = []
        self._shown: list[tuple[Tensor, Tensor]] = []
        """(optimizer's tensor, its data on the device)"""

    @torch.no_grad()
    def to_host(self) -> None:
        """Does nothing if the state is in host memory. Raises PacsError if host memory cannot be pinned."""
        if self._kind == "none" or self._moved:
            return
        complete(self._chunks)
        self._optimizer.megatron.zero_grad()
        weights = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        of_weights, mine = _storages(weights), {id(parameter) for parameter in weights}
        state = [t for t in self._optimizer.tensors() if t.device.type == self._device.type and id(t) not in mine]
        moved = of_weights | _storages(state) if self._kind == "all" else _storages(state)
        if self._kind != "all":
            moved = {key: storage for key, storage in moved.items() if key not in of_weights}
        offset = 0
        for key, storage in moved.items():
            self._moved[key] = _Moved(storage, storage.nbytes(), offset)
            offset += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        self._reserve(offset)
        for item in self._moved.values():
            self._place(item).copy_(self._bytes(item.storage), non_blocking=True)
        self._wait()
        for tensor in state:
            if tensor.untyped_storage()._cdata in self._moved:
                self._shown.append((tensor, tensor.detach()))
                tensor.data = self.readable(tensor)
        gradients = [parameter.main_grad for parameter in weights if hasattr(parameter, "main_grad")]
        self._freed = [(storage, storage.nbytes()) for storage in _storages(gradients).values()]
        for storage in [item.storage for item in self._moved.values()] + [storage for storage, _ in self._freed]:
            storage.resize_(0)

    @torch.no_grad()
    def to_device(self) -> None:
        """Inverse of `to_host`, bit for bit; gradients are undefined. Does nothing if the state is on the device."""
        for storage, num_bytes in self._freed:
            storage.resize_(num_bytes)
        for item in self._moved.values():
            item.storage.resize_(item.num_bytes)
            self._bytes(item.storage).copy_(self._place(item), non_blocking=True)
        self._wait()
        for tensor, data in self._shown:
            tensor.data = data
        self._freed, self._moved, self._shown = [], {}, []

    def readable(self, tensor: Tensor) -> Tensor:
        """The tensor's values: itself, or while it is off-loaded a view of the host copy."""
        item = self._moved.get(tensor.untyped_storage()._cdata)
        if item is None:
            return tensor
        start = item.offset // tensor.element_size() + tensor.storage_offset()
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(self.host.untyped_storage(), start, tensor.size(), tensor.stride())

    def _reserve(self, num_bytes: int) -> None:
        if self.host.numel() >= num_bytes:
            return
        self.host = torch.empty(num_bytes, dtype=torch.uint8)
        if self._device.type == "cuda":
            pin(self.host, f"policy.offload={self._kind}")

    def _place(self, item: _Moved) -> Tensor:
        return self.host[item.offset : item.offset + item.num_bytes]

    def _bytes(self, storage: UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
