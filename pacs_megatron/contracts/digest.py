"""The digest of exported weights, equal on every host. The device of the weights computes it.

It identifies the export that a sample came from. Only the server's checksums prove that a server
has these weights (`rollout.sync.verify`). Equal weights on a GPU and on a CPU have different
digests.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    import torch

TILE = 1 << 16
"""Words of one tile; the words of a tile share the multiplier v_t."""
_TILES_PER_CHUNK = 256
"""Tiles of one product, so that the int64 products need at most 128 MiB."""


class WeightDigest:
    """xxh3-128 over (name, dtype, shape, content) of every tensor, in export order.

    The content of a CPU tensor is its bytes. The content of a GPU tensor is `word_sum`, because a
    copy of a whole model to host memory takes longer than the transfer to the servers.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self._sums: list[torch.Tensor] = []

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """Adds one tensor. Does not wait for the GPU."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._state.update(f"{name}|{dtype}|{list(tensor.shape)}|".encode())
        if not tensor.numel():
            return

        if is_on_gpu(tensor):
            self._sums.append(word_sum(tensor))
        else:
            self._state.update(as_bytes(tensor).numpy().data)

    def hexdigest(self) -> str:
        """32 hexadecimal digits of the tensors so far. Waits for the GPU."""
        state = self._state.copy()
        if self._sums:
            import torch

            state.update(torch.stack(self._sums).cpu().numpy().data)
        return state.hexdigest()


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8 [bytes]; a view if the tensor is contiguous."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, padded with zeros to a multiple of 4, as int32 [words].

    A view if the tensor is contiguous, needs no padding, and its memory is aligned to 4 bytes.
    """
    import torch

    data = as_bytes(tensor)
    num_missing = -data.numel() % 4
    if num_missing:
        data = torch.cat([data, data.new_zeros(num_missing)])

    is_aligned = data.storage_offset() % 4 == 0
    aligned = data if is_aligned else data.clone()
    return aligned.view(torch.int32)


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of word i of tile t times w_i times v_t, modulo 2**64.

    A multilinear hash (Lemire and Kaser, arXiv:1202.4961) of 32-bit words with odd 64-bit
    multipliers. Any single changed bit changes it. An exchange, a move or a removal of words
    changes it except in about one case in 2**32.

    Returns:
        int64 [], on the tensor's device.
    """
    import torch

    words = as_words(tensor)
    num_tiles = -(-words.numel() // TILE)
    # The next power of two, so that tensors of similar sizes share the cached multipliers.
    num_tile_multipliers = 1 << max(num_tiles - 1, 1).bit_length()
    word_multipliers = _multipliers(TILE, 0, words.device)
    tile_multipliers = _multipliers(num_tile_multipliers, TILE, words.device)

    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(0, num_tiles, _TILES_PER_CHUNK):
        chunk = words[first * TILE : (first + _TILES_PER_CHUNK) * TILE]
        if chunk.numel() % TILE:
            chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % TILE))

        sums = (chunk.view(-1, TILE) * word_multipliers).sum(1)
        total += (sums * tile_multipliers[first : first + len(sums)]).sum()
    return total


@lru_cache(maxsize=16)
def _multipliers(count: int, offset: int, device: torch.device) -> torch.Tensor:
    """SplitMix64 of the numbers from `offset`, made odd; int64 [count]."""
    import torch

    x = np.arange(offset + 1, offset + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    odd = x | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)
