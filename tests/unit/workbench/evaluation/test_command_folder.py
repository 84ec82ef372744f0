"""An evaluation reads an exported folder: its weights must be those of the certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.convert.convert import ConversionOptions, hf_to_megatron, megatron_to_hf
from pacs_megatron.errors import CheckpointError
from pacs_megatron.workbench.evaluation.command import certified_digests
from pacs_megatron.workbench.evaluation.samplers import push_folder


class Receiver:
    def begin_update(self, version: int) -> None: ...

    def put(self, name: str, tensor: Any) -> None: ...

    def end_update(self, digest: str) -> None: ...


def test_an_altered_weight_of_an_export_is_rejected(tiny_qwen3: Path, tmp_path: Path) -> None:
    hf_to_megatron(str(tiny_qwen3), ConversionOptions(out=tmp_path / "ckpt"))
    options = ConversionOptions(out=tmp_path / "hf")
    megatron_to_hf(tmp_path / "ckpt", options, step=None, max_shard_bytes=10**9)
    folder = HfFolder(tmp_path / "hf")
    certified = certified_digests(folder)
    assert set(certified) == set(folder.names)
    push_folder(folder, Receiver(), 0, certified)
    file = tmp_path / "hf" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="was altered since the export"):
        push_folder(HfFolder(tmp_path / "hf"), Receiver(), 0, certified)
    push_folder(HfFolder(tmp_path / "hf"), Receiver(), 0)  # --no-verify


def test_a_folder_without_certificate_is_read(tiny_qwen3: Path) -> None:
    assert certified_digests(HfFolder(tiny_qwen3)) == {}
