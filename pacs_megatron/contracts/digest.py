"""The digest of a set of exported weights: equal on every host, and cheap (10 GB/s).

It is in `contracts` because trainer, embedded engine and weight sync, three layers, must compute the same one. It shows
which export a sample came from. It does not show that a server has these weights: the server's checksums do
(`rollout.sync.verify`).
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
        """Adds one tensor. The digest depends on its dtype, not on its strides or device."""
        import torch

        dtype = str(tensor.dtype).removeprefix("torch.")
        self._state.update(f"{name}|{dtype}|{list(tensor.shape)}|".encode())
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel():
            self._state.update(flat.view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        return self._state.hexdigest()
