"""The index of a `torch_dist` checkpoint, read and written without Megatron and without running pickled code.

`.metadata` is a pickle of torch's `Metadata` record. Only a list of allowed classes is loaded from it, so a checkpoint of
unknown origin cannot run code. Megatron's own loader has no such guard: call `check_metadata` before it.
"""

import io
import pickle
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from pacs_megatron.errors import CheckpointError
from pacs_megatron.runtime.json_reader import read_bytes, read_object

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

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_DCP}.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata _MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem": "_StorageInfo",
    f"{_DCP}.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.serialization": "_get_layout",
    "torch": "Size float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool float8_e4m3fn float8_e5m2",
    "collections": "OrderedDict",
    "builtins": "set frozenset",
    "pathlib": "Path PosixPath PurePosixPath",
    "pathlib._local": "Path PosixPath PurePosixPath",
}
"""module -> names of it that may be loaded"""


class _Unpickler(pickle._Unpickler):
    """Python's own, not the faster C one, which allocates gigabytes for a damaged memo index."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, "").split():
            raise pickle.UnpicklingError(f"it loads {module}.{name}, which is not part of a checkpoint")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """The index of a checkpoint's `dist` folder. Raises CheckpointError if it is missing, damaged or unsafe."""
    _check_config(folder)
    path = folder / METADATA_NAME
    if not path.exists():
        raise CheckpointError(f"{path} is missing; the checkpoint is not complete, use another one")
    content = read_bytes(path, error=CheckpointError)
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
        _check_types(metadata)
    except Exception as error:  # noqa: BLE001  a damaged pickle can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"{path} is damaged or unsafe ({reason}); use another copy") from None
    return cast("Metadata", metadata)


def _check_types(metadata: Any) -> None:
    """Raises TypeError or ValueError unless every field that is read has its type."""
    _expect(metadata, Metadata)
    for key, entry in _expect(metadata.state_dict_metadata, dict).items():
        _expect(key, str)
        if isinstance(entry, BytesStorageMetadata):
            continue
        _expect(_expect(entry, TensorStorageMetadata).properties.dtype, torch.dtype)
        rank = len(_sizes(entry.size))
        for chunk in _expect(entry.chunks, list):
            if {len(_sizes(chunk.offsets)), len(_sizes(chunk.sizes))} != {rank}:
                raise ValueError(f"a piece of {key} has another number of dimensions")
    for index, info in _expect(metadata.storage_data, dict).items():
        _expect(_expect(index, MetadataIndex).fqn, str)
        _expect(info.relative_path, str)
        _sizes((info.offset, info.length))


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    """Raises unless all of them are integers from 0 to 2**62."""
    for value in _expect(values, tuple):
        if not 0 <= _expect(value, int) < 2**62:
            raise ValueError(f"the size {value} is out of range")
    return tuple(values)


def check_metadata(folder: Path) -> None:
    """Raises CheckpointError unless Megatron may load this folder: complete, of a known format, no code in the index."""
    metadata = read_metadata(folder)
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, num_bytes in sorted(needed.items()):
        if Path(name).name != name:
            raise CheckpointError(f"{folder / METADATA_NAME} names {name!r}, which is not a file of this folder")
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; the checkpoint is not complete, use another copy")
        if file.stat().st_size < num_bytes:
            raise CheckpointError(f"{file} is {file.stat().st_size} bytes, expected {num_bytes}: truncated")


def _check_config(folder: Path) -> None:
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {folder} is no Megatron distributed checkpoint")
    found = read_object(path, error=CheckpointError).get("sharded_backend")
    if found != CONFIG["sharded_backend"]:
        raise CheckpointError(f"{path}: sharded_backend is {found!r}, expected {CONFIG['sharded_backend']!r}")
