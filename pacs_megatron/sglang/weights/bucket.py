"""Tensors packed back to back into one flat byte buffer of bounded size, which is sent as a unit."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor's place in a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """bytes"""
    num_bytes: int


class Bucket:
    """Up to `capacity` bytes, or one larger tensor. `clear` keeps the memory for reuse."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.items: list[Item] = []
        self.num_bytes = 0

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `add` may be called. A view in the tensor's dtype must start at a multiple of its item size."""
        if not self.items:
            return True
        aligned = self.num_bytes % tensor.element_size() == 0
        return aligned and tensor.device == self._buffer.device and self.num_bytes + tensor.nbytes <= self._capacity

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copies the tensor's bytes into the buffer."""
        if not self.items:
            self._reserve(tensor)
        end = self.num_bytes + tensor.nbytes
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._buffer[self.num_bytes : end].copy_(flat)
        self.items.append(Item(name, tensor.dtype, tuple(tensor.shape), self.num_bytes, tensor.nbytes))
        self.num_bytes = end

    @property
    def data(self) -> torch.Tensor:
        """uint8 [num_bytes], a view"""
        return self._buffer[: self.num_bytes]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Views of `data` in their dtypes and shapes."""
        return [
            (item.name, self._buffer[item.offset : item.offset + item.num_bytes].view(item.dtype).reshape(item.shape))
            for item in self.items
        ]

    def clear(self) -> None:
        self.items = []
        self.num_bytes = 0

    def free(self) -> None:
        """`clear`, and returns the memory to the GPU."""
        on_gpu = self._buffer.is_cuda
        self.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if on_gpu:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _reserve(self, tensor: torch.Tensor) -> None:
        size = max(self._capacity, tensor.nbytes)
        if self._buffer.device != tensor.device or self._buffer.numel() < tensor.nbytes or self._buffer.numel() > size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old buffer before the new one is allocated
            self._buffer = torch.empty(size, dtype=torch.uint8, device=tensor.device)
