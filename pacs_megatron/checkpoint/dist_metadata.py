"""The index of a `torch_dist` checkpoint, read and written without Megatron and without running pickled code.

`.metadata` is a pickle of torch's `Metadata` record. It is read through a list of allowed classes, so that a checkpoint
from elsewhere cannot run code here; Megatron's own loader has no such guard, so call `check_metadata` before it.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.metadata import Metadata

from pacs_megatron.errors import CheckpointError

METADATA_NAME = ".metadata"
CONFIG_NAME = "metadata.json"
COMMON_NAME = "common.pt"
MODEL_PREFIX = "model."
"""Before every key of the policy's weights"""
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

_DCP = "torch.distributed.checkpoint"
_ALLOWED: dict[str, frozenset[str]] = {
    f"{_DCP}.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    f"{_DCP}.filesystem": frozenset({"_StorageInfo"}),
    f"{_DCP}.planner": frozenset({"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset(
        {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}
        | {"float8_e4m3fn", "float8_e5m2"}
    ),
    "collections": frozenset({"OrderedDict"}),
    "builtins": frozenset({"set", "frozenset"}),
    "pathlib": frozenset({"Path", "PosixPath", "PurePosixPath"}),
    "pathlib._local": frozenset({"Path", "PosixPath", "PurePosixPath"}),
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointError(
                f"{self._path} wants to load {module}.{name}, which no checkpoint needs; do not use this checkpoint"
            )
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """The index of a checkpoint's `dist` folder. Raises CheckpointError where it is missing, damaged or unsafe."""
    _check_config(folder)
    path = folder / METADATA_NAME
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file, path).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; the checkpoint was not written to its end, use another one"
        ) from None
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); use another copy") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path} is no index of a torch_dist checkpoint; use another copy")
    return metadata


def check_metadata(folder: Path) -> None:
    """Raises CheckpointError unless Megatron may load this folder: whole, known format, index without foreign code."""
    metadata = read_metadata(folder)
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, num_bytes in sorted(needed.items()):
        if Path(name).name != name:
            raise CheckpointError(f"{folder / METADATA_NAME} names {name!r}, which is not a file of this folder")
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; the checkpoint is not whole, use another copy")
        if file.stat().st_size < num_bytes:
            raise CheckpointError(f"{file} is {file.stat().st_size} bytes, expected {num_bytes}: truncated")


def _check_config(folder: Path) -> None:
    path = folder / CONFIG_NAME
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {folder} is no Megatron distributed checkpoint") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); use another copy") from None
    found = config.get("sharded_backend") if isinstance(config, dict) else config
    if found != CONFIG["sharded_backend"]:
        raise CheckpointError(f"{path}: sharded_backend is {found!r}, expected {CONFIG['sharded_backend']!r}")
