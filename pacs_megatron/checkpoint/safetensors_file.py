"""One .safetensors file: its header read and checked, its tensors as views of the mapped file.

safetensors' own reader is not used: it gives no views that can be dropped from memory again, and no check of a header
against the size of its file.

Layout (safetensors 0.x): 8 bytes little-endian header length, a JSON header, then the tensors without gaps.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pacs_megatron.checkpoint.page_cache import MappedFile
from pacs_megatron.errors import CheckpointError
from pacs_megatron.runtime.json_reader import as_object, parse_json

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20
"""safetensors' own limit"""
_MAX_DIMS = 8
_MAX_SIZE = 2**62


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor at `offset` bytes from the start of its file."""

    info: TensorInfo
    offset: int


class SafetensorsFile:
    """A mapped file. Raises CheckpointError if header and size do not agree, for example after a truncated download."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            state = "is not a regular file" if path.exists() else "is missing"
            raise CheckpointError(f"{path} {state}; download the checkpoint again")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header, data_start = self._read_header(file.read(8), file, size)
            self.tensors = self._check(header, data_start, size)
        self._file = MappedFile(path)

    def get(self, name: str) -> torch.Tensor:
        """The tensor as a view of the mapped file, read page by page on use."""
        stored = self.tensors[name]
        info = stored.info
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        self._file.prefetch(stored.offset, info.nbytes)
        count = math.prod(info.shape)
        flat = torch.frombuffer(self._file.map, dtype=info.dtype, count=count, offset=stored.offset)
        return flat.reshape(info.shape)

    def release(self, name: str) -> None:
        """Drops the tensor's pages from memory. Views lose values that were written to them."""
        stored = self.tensors[name]
        if stored.info.nbytes:
            self._file.release(stored.offset, stored.info.nbytes)

    def _read_header(self, prefix: bytes, file: Any, size: int) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{self.path} is not a complete safetensors file ({size} bytes, header of {length}); download it again"
            )
        where = f"{self.path}: header"
        header = as_object(parse_json(file.read(length), where, error=CheckpointError), where, error=CheckpointError)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise CheckpointError(f"{where}: __metadata__ is damaged ({str(metadata)[:100]}); download the file again")
        return header, 8 + length

    def _check(self, header: Mapping[str, Any], data_start: int, size: int) -> dict[str, Stored]:
        tensors: dict[str, Stored] = {}
        end = 0
        # Empty tensors first: they end where the next one starts.
        for start, stop, info in sorted((self._entry(*item) for item in header.items()), key=lambda found: found[:2]):
            if start != end or stop - start != info.nbytes:
                raise CheckpointError(
                    f"{self.path}: {info.name} of {info.nbytes} bytes is at {start}..{stop}, expected at {end}; "
                    "the header is damaged, download the file again"
                )
            tensors[info.name] = Stored(info, data_start + start)
            end = stop
        if size != data_start + end:
            raise CheckpointError(
                f"{self.path} is {size} bytes, expected {data_start + end} from its header: truncated or overwritten; "
                "download it again"
            )
        return tensors

    def _entry(self, name: str, entry: Any) -> tuple[int, int, TensorInfo]:
        """(start, stop, info) of a header's entry."""
        found: dict[str, Any] = entry if isinstance(entry, dict) else {}
        code, shape, place = found.get("dtype"), found.get("shape", 0), found.get("data_offsets", 0)
        if not (_are_sizes(shape) and len(shape) <= _MAX_DIMS and _are_sizes(place) and len(place) == 2):
            raise CheckpointError(
                f"{self.path}: the header's entry of {name[:100]} is damaged ({str(entry)[:100]}); download it again"
            )
        if not isinstance(code, str) or code not in _DTYPES:
            raise CheckpointError(f"{self.path}: {name} has dtype {str(code)[:60]!r}, which is not supported")
        return place[0], place[1], TensorInfo(name, _DTYPES[code], tuple(shape))


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _MAX_SIZE for value in values)


def plan_header(tensors: Sequence[TensorInfo]) -> tuple[bytes, dict[str, Stored]]:
    """The header of a file, and the place of each tensor in the given order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for info in tensors:
        header[info.name] = {
            "dtype": _CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [end, end + info.nbytes],
        }
        end += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    stored = {i.name: Stored(i, len(prefix) + header[i.name]["data_offsets"][0]) for i in tensors}
    return prefix, stored


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order; copies only a tensor that is not contiguous."""
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
