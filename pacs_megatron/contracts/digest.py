"""The digest of exported weights: the same on every host, and fast (10 GB/s).

It is in `contracts` because the trainer, the embedded engine and the weight sync compute the same digest. It identifies
the export that a sample came from. It does not prove that a server has these weights: the server's own checksums do
(`weight_sync.verify`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch


class WeightDigest:
    """xxh3-128 over (name, dtype, shape, bytes) of every tensor, in export order."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """Adds one tensor; the digest depends on its dtype, not on its strides or device."""
        import torch

        dtype = str(tensor.dtype).removeprefix("torch.")
        self._state.update(f"{name}|{dtype}|{list(tensor.shape)}|".encode())
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel():
            self._state.update(flat.view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        return self._state.hexdigest()
