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
"""bytes; the copy of every storage starts at a multiple"""


class Offload:
    """Moves the state of one model between the device and the host.

    `optimizer` moves fp32 weights and moments, and frees without a copy what is computed again: the
    gradients in each update, and Transformer Engine's FP8 copies of the weights in the first
    micro-batch of each pass. `all` also moves the weights.
    """

    def __init__(
        self,
        kind: OffloadKind,
        chunks: list[DistributedDataParallel],
        optimizer: Optimizer,
        device: torch.device,
    ) -> None:
        """The state is on the device.

        Args:
            kind: `policy.offload`; `none` never moves anything.
            chunks: this rank's model chunks.
            optimizer: of these chunks.
            device: of the chunks.
        """
        self._kind = kind
        self._chunks = chunks
        self._optimizer = optimizer
        self._device = device
        self.host = torch.empty(0, dtype=torch.uint8)
        """all copies, one after the other"""
        self._is_on_host = False
        """not the same as `_moved`, which is empty where only gradients are on the device"""
        self._moved: dict[int, tuple[UntypedStorage, Tensor]] = {}
        """identity of a storage -> the storage, and the bytes of its copy in `host`"""
        self._freed: list[tuple[UntypedStorage, int]] = []
        """storages without a copy, and their bytes on the device"""
        self._shown: list[tuple[Tensor, Tensor]] = []
        """tensors of the optimizer that refer to the host copy, and their data on the device"""

    @torch.no_grad()
    def to_host(self) -> None:
        """Moves the state to host memory, if it is on the device.

        Raises:
            PacsError: if host memory cannot be pinned.
        """
        if self._kind == "none" or self._is_on_host:
            return
        complete(self._chunks)
        self._optimizer.megatron.zero_grad()
        for chunk in self._chunks:
            _free_fp8_copies(chunk)

        weights: list[Tensor] = []
        for chunk in self._chunks:
            weights += chunk.parameters()
        state = self._optimizer_state(weights)

        self._copy_to_host(self._storages_to_move(weights, state))
        self._is_on_host = True
        for tensor in state:
            if tensor.untyped_storage()._cdata in self._moved:
                self._shown.append((tensor, tensor.detach()))
                tensor.data = self.readable(tensor)

        gradients = [weight.main_grad for weight in weights if hasattr(weight, "main_grad")]
        freed = _storages(gradients).values()
        self._freed = [(storage, storage.nbytes()) for storage in freed]

        for storage, _ in self._moved.values():
            storage.resize_(0)
        for storage, _ in self._freed:
            storage.resize_(0)

    def _optimizer_state(self, weights: list[Tensor]) -> list[Tensor]:
        """The optimizer's tensors on the device that are not the weights themselves."""
        is_weight = {id(weight) for weight in weights}
        state = []
        for tensor in self._optimizer.tensors():
            if tensor.device.type == self._device.type and id(tensor) not in is_weight:
                state.append(tensor)
        return state

    def _storages_to_move(
        self,
        weights: list[Tensor],
        state: list[Tensor],
    ) -> dict[int, UntypedStorage]:
        """The storages of the state; those of the weights exactly if `all` is set.

        A tensor of the optimizer may share its storage with a weight.

        Returns:
            Identity of a storage -> the storage.
        """
        of_weights = _storages(weights)
        of_state = _storages(state)
        if self._kind == "all":
            return of_weights | of_state
        return {key: storage for key, storage in of_state.items() if key not in of_weights}

    def _copy_to_host(self, storages: dict[int, UntypedStorage]) -> None:
        """Copies the storages into `host` and records them in `_moved`."""
        sizes = []
        for storage in storages.values():
            num_blocks = -(-storage.nbytes() // _ALIGNMENT)
            sizes.append(num_blocks * _ALIGNMENT)
        num_bytes = sum(sizes)
        if self.host.numel() < num_bytes:
            host = torch.empty(num_bytes, dtype=torch.uint8)
            if self._device.type == "cuda":
                pin(host, f"policy.offload={self._kind}")
            self.host = host

        places = torch.split(self.host[:num_bytes], sizes)
        for (key, storage), place in zip(storages.items(), places, strict=True):
            copy = place[: storage.nbytes()]
            copy.copy_(self._bytes(storage), non_blocking=True)
            self._moved[key] = (storage, copy)
        self._wait()

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
        self._is_on_host = False
        self._freed = []
        self._moved = {}
        self._shown = []

    def readable(self, tensor: Tensor) -> Tensor:
        """The tensor's values: the tensor itself, or a view of the host copy.

        Args:
            tensor: of the model or the optimizer, on the device or off-loaded.

        Returns:
            A tensor of the same shape, strides and dtype.
        """
        moved = self._moved.get(tensor.untyped_storage()._cdata)
        if moved is None:
            return tensor

        _, copy = moved
        values = copy.view(tensor.dtype)
        # as_strided counts from the start of `host`.
        offset = values.storage_offset() + tensor.storage_offset()
        return values.as_strided(tensor.size(), tensor.stride(), offset)

    def _bytes(self, storage: UntypedStorage) -> Tensor:
        """uint8 [bytes], a view of the whole storage."""
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _free_fp8_copies(chunk: DistributedDataParallel) -> None:
    """Transformer Engine's modules keep them in `_fp8_workspaces` (pytorch/module/base.py)."""
    for module in chunk.modules():
        copies = getattr(module, "_fp8_workspaces", None)
        if copies is not None:
            copies.clear()


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Identity of a storage -> the storage, of all tensors."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
    return storages
