"""Reads single tensors of a `torch_dist` checkpoint, written by a conversion or by a training run
in any layout.

Its index, `.metadata`, is a pickle of torch's `Metadata` record. Only a list of allowed classes is
loaded from it, so a checkpoint of unknown origin cannot run code.

torch's own reader (`torch.distributed.checkpoint.load` with FileSystemReader) is not used. It
copies a whole tensor before it returns, reads a whole stack to get one expert, runs in one thread,
and unpickles any class. A conversion needs views of mapped files, which limit its memory to a few
tensors.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import sys
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from pacs_megatron.checkpoint.page_cache import MappedFile
from pacs_megatron.errors import CheckpointError, one_line
from pacs_megatron.runtime.json_reader import read_bytes, read_object

Shape = tuple[int, ...]
METADATA_NAME = ".metadata"
CONFIG_NAME = "metadata.json"
COMMON_NAME = "common.pt"
MODEL_PREFIX = "model."
"""Prefix of every key of the policy's weights"""
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
UNREADABLE = (
    RuntimeError,
    ValueError,
    EOFError,
    OSError,
    KeyError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
"""Errors of torch.load for a damaged archive"""

_ZIP_HEADER_BYTES = 30
"""Bytes of a zip archive's local file header before the name; its last 4 bytes are the lengths of
name and extra field
"""
_ZIP_LENGTHS_AT = 26
_MAX_SIZE = 2**62

_DCP = "torch.distributed.checkpoint"
_PATHS = ("Path", "PosixPath", "PurePosixPath")
_ALLOWED: dict[str, tuple[str, ...]] = {
    f"{_DCP}.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    f"{_DCP}.filesystem": ("_StorageInfo",),
    f"{_DCP}.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "torch.serialization": ("_get_layout",),
    "torch": (
        *("Size", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    ),
    "collections": ("OrderedDict",),
    "builtins": ("set", "frozenset"),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
"""module -> names of it that may be loaded"""


class _Unpickler(pickle._Unpickler):
    """Python's unpickler. The faster C unpickler allocates gigabytes for a damaged memo index."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(
                f"it loads {module}.{name}, which is not part of a checkpoint"
            )
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """The index of a checkpoint's `dist` folder.

    Raises CheckpointError unless Megatron may load this folder: complete, of a known format, no
    code in the index.
    """
    config = folder / CONFIG_NAME
    if not config.is_file():
        raise CheckpointError(
            f"{config} is missing; {folder} is no Megatron distributed checkpoint"
        )
    backend = read_object(config, error=CheckpointError).get("sharded_backend")
    if backend != CONFIG["sharded_backend"]:
        raise CheckpointError(
            f"{config}: sharded_backend is {backend!r}, expected {CONFIG['sharded_backend']!r}"
        )

    path = folder / METADATA_NAME
    if not path.exists():
        raise CheckpointError(f"{path} is missing; the checkpoint is not complete, use another one")
    content = read_bytes(path, error=CheckpointError)
    try:
        metadata = _checked(_Unpickler(io.BytesIO(content)).load())
    except Exception as error:  # noqa: BLE001  a damaged pickle can raise anything
        reason = one_line(f"{type(error).__name__}: {error}")[:200]
        raise CheckpointError(f"{path} is damaged or unsafe ({reason}); use another copy") from None
    _check_files(folder, metadata)
    return metadata


def _check_files(folder: Path, metadata: Metadata) -> None:
    """Raises CheckpointError unless the folder has the index's files with all of their bytes."""
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), end)

    for name, num_bytes in sorted(needed.items()):
        if Path(name).name != name:
            raise CheckpointError(
                f"{folder / METADATA_NAME} names {name!r}, which is not a file of this folder"
            )
        file = folder / name
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing; the checkpoint is not complete, use another copy"
            )
        size = file.stat().st_size
        if size < num_bytes:
            raise CheckpointError(f"{file} is {size} bytes, expected {num_bytes}: truncated")


def _checked(metadata: Any) -> Metadata:
    """`metadata`. Raises TypeError or ValueError unless every field that is read has its type."""
    _expect(metadata, Metadata)
    for key, entry in _expect(metadata.state_dict_metadata, dict).items():
        _expect(key, str)
        if isinstance(entry, BytesStorageMetadata):
            continue
        tensor = _expect(entry, TensorStorageMetadata)
        _expect(tensor.properties.dtype, torch.dtype)
        num_dims = len(_sizes(tensor.size))
        for chunk in _expect(tensor.chunks, list):
            if {len(_sizes(chunk.offsets)), len(_sizes(chunk.sizes))} != {num_dims}:
                raise ValueError(f"a piece of {key} has another number of dimensions")

    for index, info in _expect(metadata.storage_data, dict).items():
        _expect(_expect(index, MetadataIndex).fqn, str)
        _expect(info.relative_path, str)
        _sizes((info.offset, info.length))
    return cast("Metadata", metadata)


def _expect(value: Any, kind: type) -> Any:
    """`value`. Raises TypeError unless it is of this class."""
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    """`values` as a tuple. Raises unless all of them are integers from 0 to 2**62."""
    for value in _expect(values, tuple):
        if not 0 <= _expect(value, int) < _MAX_SIZE:
            raise ValueError(f"the size {value} is out of range")
    return tuple(values)


class DistReader:
    """Reads the tensors of a `dist` folder."""

    def __init__(self, folder: Path) -> None:
        """Reads the index; `get` reads the data.

        Raises CheckpointError if files are missing, truncated or unsafe.
        """
        metadata = read_metadata(folder)
        self._folder = folder
        self._storage = metadata.storage_data
        self._files: dict[Path, MappedFile] = {}
        self._mutex = threading.Lock()
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the tensors; a training checkpoint also has other objects."""
        return frozenset(self._tensors)

    def shape(self, key: str) -> Shape:
        return tuple(self._tensor(key).size)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor(key).properties.dtype

    def get(self, key: str, index: int | None = None) -> torch.Tensor:
        """A tensor of the checkpoint. Safe from any thread.

        Args:
            key: of the tensor.
            index: row of its first dimension (a stack of experts); None: the whole tensor.

        Returns:
            A view of the mapped file (copy-on-write) if one piece contains all of it, else a new
            tensor.

        Raises:
            CheckpointError: if the pieces do not cover the tensor, or one cannot be read.
        """
        tensor = self._tensor(key)
        # The box [low, high) of the tensor, in its own coordinates.
        low = [0] * len(tensor.size)
        high = list(tensor.size)
        if index is not None:
            low[0] = index
            high[0] = index + 1
        shape = [stop - start for start, stop in zip(low, high, strict=True)]

        result: torch.Tensor | None = None
        num_covered = 0
        for number, chunk in enumerate(tensor.chunks):
            # The intersection of the box and the piece.
            starts = [max(start, offset) for start, offset in zip(low, chunk.offsets, strict=True)]
            stops = [
                min(stop, offset + size)
                for stop, offset, size in zip(high, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue

            place = MetadataIndex(key, chunk.offsets, number)
            data = self._read(place, tuple(chunk.sizes), tensor.properties.dtype)
            part = data[_slices(starts, stops, chunk.offsets)]
            num_covered += part.numel()
            if list(part.shape) == shape:
                result = part
                break
            if result is None:
                result = torch.empty(shape, dtype=part.dtype)
            result[_slices(starts, stops, low)] = part

        if result is None or num_covered != result.numel():
            raise CheckpointError(
                f"{self._folder}: the pieces of {key} do not cover it; the checkpoint is not "
                "complete"
            )
        return result if index is None else result[0]

    def release(self, key: str, index: int | None = None) -> None:
        """Drops the data of `get` from memory.

        Views read it again and lose values that were written to them.
        """
        for number, chunk in enumerate(self._tensor(key).chunks):
            if index is not None:
                first = chunk.offsets[0]
                if not first <= index < first + chunk.sizes[0]:
                    continue
            info = self._storage[MetadataIndex(key, chunk.offsets, number)]
            self._file(self._folder / info.relative_path).release(info.offset, info.length)

    def _tensor(self, key: str) -> TensorStorageMetadata:
        if key not in self._tensors:
            raise CheckpointError(
                f"{self._folder} has no tensor {key}; it belongs to another model"
            )
        return self._tensors[key]

    def _read(self, index: MetadataIndex, sizes: Shape, dtype: torch.dtype) -> torch.Tensor:
        """One piece. Raises CheckpointError unless it has the shape and dtype of the index."""
        if index not in self._storage:
            raise CheckpointError(
                f"{self._folder}: the index has no entry for a piece of {index.fqn}; use another "
                "copy"
            )
        info = self._storage[index]
        path = self._folder / info.relative_path
        file = self._file(path)
        file.prefetch(info.offset, info.length)
        window = _Window(file.map, info.offset, info.length)
        try:
            data = _mapped(window)
        except UNREADABLE as error:
            # Without the message of torch's unpickler, which advises to load without its guard.
            text = ""
            if not isinstance(error, pickle.UnpicklingError):
                text = f": {one_line(str(error))[:200]}"
            raise CheckpointError(
                f"{path}: the piece of {index.fqn} cannot be read ({type(error).__name__}{text}); "
                "use another copy"
            ) from None
        if data is None or tuple(data.shape) != sizes or data.dtype != dtype:
            raise CheckpointError(
                f"{path}: the piece of {index.fqn} does not match the index; use another copy"
            )
        return data

    def _file(self, path: Path) -> MappedFile:
        with self._mutex:
            if path not in self._files:
                self._files[path] = MappedFile(path)
            return self._files[path]


def _slices(
    starts: Sequence[int], stops: Sequence[int], origin: Sequence[int]
) -> tuple[slice, ...]:
    """The box [starts, stops) in coordinates that begin at `origin`."""
    return tuple(
        slice(start - first, stop - first)
        for start, stop, first in zip(starts, stops, origin, strict=True)
    )


def _mapped(window: _Window) -> torch.Tensor | None:
    """The tensor that torch.save wrote into the window: a view of the file if the file has it in
    row-major order.

    None for anything but a tensor.
    """
    outline: Any = torch.load(cast("IO[bytes]", window), map_location="meta", weights_only=True)
    if not torch.is_tensor(outline):
        return None
    start = _storage_offset(window)
    is_row_major = outline.is_contiguous() and outline.storage_offset() == 0
    if start is None or not is_row_major or outline.numel() == 0:
        window.seek(0)
        loaded: torch.Tensor = torch.load(
            cast("IO[bytes]", window), map_location="cpu", weights_only=True
        )
        return loaded.detach()

    raw = torch.frombuffer(window.file, dtype=torch.uint8, count=outline.nbytes, offset=start)
    if start % outline.dtype.itemsize != 0:
        raw = raw.clone()  # `view` needs aligned bytes
    return raw.view(outline.dtype).reshape(outline.shape)


def _storage_offset(window: _Window) -> int | None:
    """Offset of the archive's only storage in the file; None if its bytes need swapping or
    unpacking.
    """
    with zipfile.ZipFile(cast("IO[bytes]", window)) as archive:
        by_name = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        storage = by_name["data/0"]
        if storage.compress_type != zipfile.ZIP_STORED:
            return None
        if archive.read(by_name["byteorder"]) != sys.byteorder.encode():
            return None
    header = window.start + storage.header_offset
    name_bytes, extra_bytes = struct.unpack_from("<HH", window.file, header + _ZIP_LENGTHS_AT)
    return header + _ZIP_HEADER_BYTES + int(name_bytes) + int(extra_bytes)


class _Window(io.RawIOBase):
    """Bytes [start, start + length) of a mapped file, as a file."""

    def __init__(self, file: mmap.mmap, start: int, length: int) -> None:
        super().__init__()
        self.file = file
        self.start = start
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

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        start = self.start + self._position
        view[:count] = memoryview(self.file)[start : start + count]
        self._position += count
        return count
