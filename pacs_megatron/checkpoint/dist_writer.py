"""Writes a `torch_dist` checkpoint tensor by tensor; the model is never in memory.

The result equals that of Megatron's `dist_checkpointing.save` for a GPTModel's sharded state dict,
except for the number of files and the borders of the pieces. `dist_checkpointing.load` reads it in
any layout. torch's writer is not used, because it needs every tensor in one state dict and loses
errors of its threads.
"""

import io
import json
import math
import os
import pickle
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pacs_megatron.checkpoint.dist_reader import COMMON_NAME, CONFIG, CONFIG_NAME, METADATA_NAME
from pacs_megatron.checkpoint.manifest import FileFacts
from pacs_megatron.checkpoint.page_cache import WriteBehind
from pacs_megatron.errors import CheckpointError
from pacs_megatron.runtime.files import naming, write_atomically

Shape = tuple[int, ...]
ALIGNMENT = 64
"""bytes; of a tensor within the archive of torch.save, and of the archive within the file"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of the tensor `key` of the given full shape."""

    key: str
    shape: Shape
    offset: Shape
    data: torch.Tensor
    """on the host; as many dimensions as `shape`"""


class DistWriter:
    """Writes a `dist` folder.

    Concurrency: several threads may call `put`. A call takes a free file from a queue, so one
    thread writes to a file at a time.
    """

    def __init__(self, folder: Path, *, num_files: int) -> None:
        """Creates the files in an existing, empty folder."""
        self._folder = folder
        self._streams: queue.SimpleQueue[_Stream] = queue.SimpleQueue()
        self._all_streams = [_Stream(folder / f"__0_{k}.distcp") for k in range(num_files)]
        for stream in self._all_streams:
            self._streams.put(stream)
        self._behind = WriteBehind()
        self._mutex = threading.Lock()
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def put(self, piece: Piece) -> None:
        """Writes one piece.

        Raises CheckpointError if it contradicts another piece of the tensor.
        """
        data = piece.data.detach().contiguous()
        # torch.save writes the whole storage of a view.
        if data.untyped_storage().nbytes() != data.nbytes:
            data = data.clone()
        self._register(piece)

        stream = self._streams.get()
        try:
            padding = bytes(-stream.position % ALIGNMENT)
            stream.write(padding)  # so that a reader can map the archive
            offset = stream.position
            torch.save(data, cast("IO[bytes]", stream))
            length = stream.position - offset
            self._behind.wrote(stream.flushed(), offset, length)
        finally:
            self._streams.put(stream)

        info = _StorageInfo(stream.path.name, offset, length)
        with self._mutex:
            self._storage[MetadataIndex(piece.key, piece.offset)] = info

    def finish(self) -> dict[str, FileFacts]:
        """Checks that every tensor is complete, flushes files and index to disk.

        Returns size and digest of the files by name. Raises CheckpointError.
        """
        for key, tensor in self._tensors.items():
            num_values = math.prod(tensor.size)
            num_written = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if num_written != num_values:
                raise CheckpointError(f"{key}: {num_written} of {num_values} values were written")
            # In order, so that the index does not depend on the threads.
            tensor.chunks.sort(key=lambda chunk: tuple(chunk.offsets))

        facts = {stream.path.name: stream.finish() for stream in self._all_streams}
        common = io.BytesIO()
        torch.save({}, common)
        small_files = {
            COMMON_NAME: common.getvalue(),
            METADATA_NAME: pickle.dumps(self._index()),
            CONFIG_NAME: json.dumps(CONFIG).encode(),
        }
        for name, data in small_files.items():
            write_atomically(self._folder / name, [data])
            facts[name] = FileFacts(len(data), xxhash.xxh3_128_hexdigest(data))
        return facts

    def close(self) -> None:
        """Closes the files and keeps them."""
        for stream in self._all_streams:
            stream.close()

    def _index(self) -> Metadata:
        """The content of `.metadata`, in an order that does not depend on the threads."""
        storage = sorted(
            self._storage.items(), key=lambda item: (item[0].fqn, tuple(item[0].offset or ()))
        )
        return Metadata(
            state_dict_metadata=dict(sorted(self._tensors.items())),
            storage_data=dict(storage),
            storage_meta=StorageMeta(),
        )

    def _register(self, piece: Piece) -> None:
        """Adds the piece to the index. Raises CheckpointError."""
        properties = TensorProperties(dtype=piece.data.dtype)
        with self._mutex:
            tensor = self._tensors.setdefault(
                piece.key, TensorStorageMetadata(properties, torch.Size(piece.shape), [])
            )
            if tensor.properties.dtype != piece.data.dtype or tuple(tensor.size) != piece.shape:
                raise CheckpointError(
                    f"{piece.key}: a piece of {piece.data.dtype} {list(piece.shape)} follows one "
                    f"of {tensor.properties.dtype} {list(tensor.size)}"
                )
            if any(tuple(chunk.offsets) == piece.offset for chunk in tensor.chunks):
                raise CheckpointError(
                    f"{piece.key}: the piece at {list(piece.offset)} was written twice"
                )
            chunk = ChunkStorageMetadata(
                offsets=torch.Size(piece.offset), sizes=torch.Size(piece.data.shape)
            )
            tensor.chunks.append(chunk)


class _Stream(io.RawIOBase):
    """An append-only file that counts and digests its bytes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.position = 0
        self._file: IO[bytes] = path.open("xb", buffering=1 << 20)
        self._digest = xxhash.xxh3_128()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        with naming(self.path):
            self._file.write(view)
        self._digest.update(view)
        self.position += len(view)
        return len(view)

    def flushed(self) -> int:
        """The descriptor, after a flush of Python's buffer."""
        with naming(self.path):
            self._file.flush()
        return self._file.fileno()

    def finish(self) -> FileFacts:
        """Flushes the file to disk and closes it; returns its size and digest."""
        with naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return FileFacts(self.position, self._digest.hexdigest())

    def close(self) -> None:
        with naming(self.path):  # it writes the bytes that a failed write has left
            self._file.close()
        super().close()
