"""Tensors of a checkpoint that this program does not train: a vision tower, MTP layers.

They are kept beside the weights, in one file of a checkpoint's metadata folder, and are written
back unchanged.
"""

from pathlib import Path

import torch

from pacs_megatron.checkpoint.hf_folder import (
    BESIDE_NAME,
    INDEX_NAME,
    SINGLE_NAME,
    HfFolder,
    is_beside,
)
from pacs_megatron.checkpoint.safetensors_file import (
    SafetensorsFile,
    TensorInfo,
    plan_header,
    tensor_bytes,
)
from pacs_megatron.models import load_config, read_spec
from pacs_megatron.runtime.files import naming, sync_path


class Beside:
    """Reads these tensors of a Hugging Face folder, or of a checkpoint's metadata folder."""

    def __init__(self, folder: Path) -> None:
        """Finds them.

        Raises:
            CheckpointError, ConversionError: the folder is damaged.
        """
        self._source: HfFolder | SafetensorsFile | None = None
        self.infos: list[TensorInfo] = []
        """name, dtype and shape of each, in the order of the files"""
        spec = read_spec(load_config(folder))
        if spec.delta is None:
            return
        own = folder / BESIDE_NAME
        if own.is_file():
            file = SafetensorsFile(own)
            self._source = file
            self.infos = list(file.tensors.values())
        elif (folder / INDEX_NAME).is_file() or (folder / SINGLE_NAME).is_file():
            whole = HfFolder(folder)
            self._source = whole
            self.infos = [whole.info(name) for name in whole.names if is_beside(name, spec)]

    @property
    def num_bytes(self) -> int:
        return sum(info.nbytes for info in self.infos)

    def get(self, name: str) -> torch.Tensor:
        """A view of the mapped file."""
        assert self._source is not None
        return self._source.get(name)

    def release(self, name: str) -> None:
        """Drops the tensor from memory."""
        assert self._source is not None
        self._source.release(name)

    def describe(self) -> str:
        """Number and size of the kept tensors, without a full stop; empty if there is none."""
        if not self.infos:
            return ""
        return (
            f"{len(self.infos)} tensors of a vision tower or MTP layers "
            f"({self.num_bytes / 1e9:.3f} GB) are kept beside, unchanged and untrained"
        )

    def write(self, folder: Path) -> None:
        """Writes them to a checkpoint's metadata folder, one tensor at a time."""
        if not self.infos:
            return
        target = folder / BESIDE_NAME
        header, placed = plan_header(self.infos)
        with naming(target), target.open("xb") as file:
            file.write(header)
            for info in placed:
                file.seek(info.offset)
                file.write(tensor_bytes(self.get(info.name)))
                self.release(info.name)
        sync_path(target)
