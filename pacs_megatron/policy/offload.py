"""The trainer's state in host memory while colocated servers use the GPU.

A storage is copied, set to size 0, and later resized and filled again, so every view of it stays
valid. Meanwhile the optimizer's tensors refer to the host copy, and `readable` returns it for a
weight. A weight's own data stays on the device: another device would replace its gradient
accumulator, which has Megatron's hooks (`VariableHooks::set_data`).
"""

from collections.abc import Iterable

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, UntypedStorage

from pacs_megatron.config.schema import OffloadKind
from pacs_megatron.policy.optimizer import Optimizer
from pacs_megatron.policy.weights import complete, pin

_ALIGNMENT = 256


class Offload:
    """`optimizer` moves fp32 weights and moments, and frees the gradients without a copy (each
    update overwrites them); `all` also moves the weights.
    """

    def __init__(
        self,
        kind: OffloadKind,
        chunks: list[DistributedDataParallel],
        optimizer: Optimizer,
        device: torch.device,
    ) -> None:
        self._kind = kind
        self._chunks = chunks
        self._optimizer = optimizer
        self._device = device
        self.host = torch.empty(0, dtype=torch.uint8)
        self._moved: dict[int, tuple[UntypedStorage, Tensor]] = {}
        """identity of a storage -> the storage, and the bytes of its copy in `host`"""
        self._freed: list[tuple[UntypedStorage, int]] = []
        self._shown: list[
            tuple[Tensor, Tensor]
        ] = []  # (optimizer's tensor, its data on the device)

    @torch.no_grad()
    def to_host(self) -> None:
        """Moves the state to host memory, if it is on the device.

        Raises PacsError if host memory cannot be pinned.
        """
        if self._kind == "none" or self._moved:
            return
        complete(self._chunks)
        self._optimizer.megatron.zero_grad()
        weights = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        of_weights = _storages(weights)
        mine = {id(parameter) for parameter in weights}
        state = [
            t
            for t in self._optimizer.tensors()
            if t.device.type == self._device.type and id(t) not in mine
        ]
        moved = of_weights | _storages(state) if self._kind == "all" else _storages(state)
        if self._kind != "all":
            moved = {key: storage for key, storage in moved.items() if key not in of_weights}
        sizes = [-(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT for storage in moved.values()]
        if self.host.numel() < sum(sizes):
            self.host = torch.empty(sum(sizes), dtype=torch.uint8)
            if self._device.type == "cuda":
                pin(self.host, f"policy.offload={self._kind}")
        for (key, storage), place in zip(
            moved.items(), torch.split(self.host[: sum(sizes)], sizes), strict=True
        ):
            self._moved[key] = storage, place[: storage.nbytes()]
            self._moved[key][1].copy_(self._bytes(storage), non_blocking=True)
        self._wait()
        for tensor in state:
            if tensor.untyped_storage()._cdata in self._moved:
                self._shown.append((tensor, tensor.detach()))
                tensor.data = self.readable(tensor)
        gradients = [
            parameter.main_grad for parameter in weights if hasattr(parameter, "main_grad")
        ]
        self._freed = [(storage, storage.nbytes()) for storage in _storages(gradients).values()]
        for storage, _ in (*self._moved.values(), *self._freed):
            storage.resize_(0)

    @torch.no_grad()
    def to_device(self) -> None:
        """Inverse of `to_host`, bit for bit; gradients are undefined.

        Does nothing if the state is on the device.
        """
        for storage, num_bytes in self._freed:
            storage.resize_(num_bytes)
        for storage, copy in self._moved.values():
            storage.resize_(copy.numel())
            self._bytes(storage).copy_(copy, non_blocking=True)
        self._wait()
        for tensor, data in self._shown:
            tensor.data = data
        self._freed = []
        self._moved = {}
        self._shown = []

    def readable(self, tensor: Tensor) -> Tensor:
        """The tensor's values: itself, or while it is off-loaded a view of the host copy."""
        found = self._moved.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        values = found[1].view(tensor.dtype)  # as_strided counts from the start of `host`
        return values.as_strided(
            tensor.size(), tensor.stride(), values.storage_offset() + tensor.storage_offset()
        )

    def _bytes(self, storage: UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
