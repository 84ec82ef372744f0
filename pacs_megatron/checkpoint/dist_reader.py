"""Reads single tensors of a `torch_dist` checkpoint, whoever wrote it: a conversion or a training run at any layout."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from pacs_megatron.checkpoint.dist_metadata import check_metadata, read_metadata
from pacs_megatron.errors import CheckpointError

Shape = tuple[int, ...]


class DistReader:
    """Raises CheckpointError on opening where files are missing, truncated or unsafe; data is read by `get`."""

    def __init__(self, folder: Path) -> None:
        check_metadata(folder)
        metadata = read_metadata(folder)
        self._folder = folder
        self._storage = metadata.storage_data
        self._tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}

    @property
    def keys(self) -> frozenset[str]:
        """Of tensors (a training checkpoint has other objects too)."""
        return frozenset(self._tensors)

    def shape(self, key: str) -> Shape:
        return tuple(self._tensor(key).size)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor(key).properties.dtype

    def get(self, key: str, index: int | None = None) -> torch.Tensor:
        """The whole tensor, or row `index` of its first dimension (a stack of experts). Safe from any thread."""
        tensor = self._tensor(key)
        low = [0] * len(tensor.size)
        high = list(tensor.size)
        if index is not None:
            low[0], high[0] = index, index + 1
        box = [stop - start for start, stop in zip(low, high, strict=True)]
        result: torch.Tensor | None = None
        covered = 0
        for number, chunk in enumerate(tensor.chunks):
            starts = [max(a, b) for a, b in zip(low, chunk.offsets, strict=True)]
            stops = [min(a, b + n) for a, b, n in zip(high, chunk.offsets, chunk.sizes, strict=True)]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            data = self._read(MetadataIndex(key, chunk.offsets, number), tuple(chunk.sizes), tensor.properties.dtype)
            source = tuple(slice(a - o, b - o) for a, b, o in zip(starts, stops, chunk.offsets, strict=True))
            part = data[source]
            covered += part.numel()
            if list(part.shape) == box:
                result = part
                break
            if result is None:
                result = torch.empty(box, dtype=part.dtype)
            result[tuple(slice(a - o, b - o) for a, b, o in zip(starts, stops, low, strict=True))] = part
        if result is None or covered != result.numel():
            raise CheckpointError(f"{self._folder}: the pieces of {key} do not cover it; the checkpoint is not whole")
        return result if index is None else result[0]

    def _tensor(self, key: str) -> TensorStorageMetadata:
        if key not in self._tensors:
            raise CheckpointError(f"{self._folder} has no tensor {key}; it belongs to another model")
        return self._tensors[key]

    def _read(self, index: MetadataIndex, sizes: Shape, dtype: torch.dtype) -> torch.Tensor:
        if index not in self._storage:
            raise CheckpointError(
                f"{self._folder}: the index has no place for a piece of {index.fqn}; use another copy"
            )
        info = self._storage[index]
        path = self._folder / info.relative_path
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), info.offset, info.length, os.POSIX_FADV_WILLNEED)
            window = _Window(file, info.offset, info.length)
            try:
                data: Any = torch.load(cast("IO[bytes]", window), map_location="cpu", weights_only=True)
            except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
                # Not the message: torch's advises to load without its guard.
                raise CheckpointError(
                    f"{path}: the piece of {index.fqn} cannot be read ({type(error).__name__}); use another copy"
                ) from None
        if not torch.is_tensor(data) or tuple(data.shape) != sizes or data.dtype != dtype:
            raise CheckpointError(f"{path}: the piece of {index.fqn} is not what the index says; use another copy")
        return data.detach()


class _Window(io.RawIOBase):
    """Bytes [start, start + length) of an open file, as a file: torch.load reads storages from it without a copy."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._length - self._position))
        done = 0
        while done < wanted:
            count = os.preadv(self._file.fileno(), [view[done:wanted]], self._start + self._position + done)
            if count == 0:
                break
            done += count
        self._position += done
        return done
