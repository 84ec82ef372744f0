"""Reads and checks the header of a .safetensors file, and returns its tensors as views of the
mapped file.

safetensors' own reader only checks the file, because it returns no views that can be dropped from
memory.

Layout (safetensors 0.x): 8 bytes little-endian header length, a JSON header, then the tensors
without gaps.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pacs_megatron.checkpoint.page_cache import MappedFile
from pacs_megatron.errors import CheckpointError, one_line
from pacs_megatron.runtime.json_reader import as_object, check_content, parse_json

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
_MAX_DIMS = 8
_MAX_SIZE = 2**62


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype, shape and place of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0
    """bytes from the start of its file"""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """A mapped file: `tensors` describes its tensors by name, `get` returns one."""

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises CheckpointError if header and size do not agree, for example after a truncated
        download.
        """
        self.path = path
        if not path.is_file():
            state = "is not a regular file" if path.exists() else "is missing"
            raise CheckpointError(f"{path} {state}; download the checkpoint again")
        try:
            # The library checks types and offsets of the header, and the size. The file is opened
            # first, because without permission the library reports a missing file.
            check_content(path, CheckpointError)
            with path.open("rb"), safe_open(path, framework="np"):
                pass
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} is truncated or damaged ({one_line(str(error))[:200]}); download it again"
            ) from None
        self.tensors = self._read_header()
        self._file = MappedFile(path)

    def get(self, name: str) -> torch.Tensor:
        """The tensor as a view of the mapped file, read page by page on use."""
        info = self.tensors[name]
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        self._file.prefetch(info.offset, info.nbytes)
        count = math.prod(info.shape)
        flat = torch.frombuffer(self._file.map, dtype=info.dtype, count=count, offset=info.offset)
        return flat.reshape(info.shape)

    def release(self, name: str) -> None:
        """Drops the tensor's pages from memory. Views lose values that were written to them."""
        info = self.tensors[name]
        if info.nbytes:
            self._file.release(info.offset, info.nbytes)

    def split(self, name: str, parts: Sequence[str], shape: tuple[int, ...]) -> None:
        """Replaces a tensor by its rows as tensors of their own.

        Args:
            name: the tensor.
            parts: names of the parts, in the order of the rows.
            shape: that of each part; together they are the whole tensor.
        """
        whole = self.tensors.pop(name)
        offset = whole.offset
        for part in parts:
            self.tensors[part] = TensorInfo(part, whole.dtype, shape, offset)
            offset += self.tensors[part].nbytes

    def _read_header(self) -> dict[str, TensorInfo]:
        """Name -> place and type, in the order of the file. Raises CheckpointError."""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length)
        where = f"{self.path}: header"
        value = parse_json(text, where, error=CheckpointError)
        header = as_object(value, where, error=CheckpointError)
        header.pop("__metadata__", None)

        for name, entry in header.items():
            # The library also accepts a list for an entry, and an object for a dtype.
            if not isinstance(entry, dict) or not isinstance(entry["dtype"], str):
                raise CheckpointError(
                    f"{self.path}: the header's entry of {name[:100]} is damaged; download the "
                    "file again"
                )

        tensors: dict[str, TensorInfo] = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            code = entry["dtype"]
            shape = entry["shape"]
            is_supported = (
                code in _DTYPES
                and len(shape) <= _MAX_DIMS
                and all(size < _MAX_SIZE for size in shape)
            )
            if not is_supported:
                raise CheckpointError(
                    f"{self.path}: {name[:100]} is {code} {shape[:_MAX_DIMS]}, which is not "
                    f"supported: expected at most {_MAX_DIMS} dimensions and a dtype of "
                    f"{', '.join(_DTYPES)}; convert the file"
                )
            offset = 8 + length + entry["data_offsets"][0]
            tensors[name] = TensorInfo(name, _DTYPES[code], tuple(shape), offset)
        return tensors


def plan_header(tensors: Sequence[TensorInfo]) -> tuple[bytes, list[TensorInfo]]:
    """The header of a file with these tensors, in the given order.

    Returns:
        The first bytes of the file.
        The tensors with their places after these bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts = []
    end = 0
    for info in tensors:
        start = end
        end = start + info.nbytes
        starts.append(start)
        header[info.name] = {
            "dtype": _CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }

    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    placed = [
        replace(info, offset=len(prefix) + start)
        for info, start in zip(tensors, starts, strict=True)
    ]
    return prefix, placed


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order; copies only a tensor that is not contiguous."""
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
