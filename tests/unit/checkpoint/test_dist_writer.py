"""torch_dist checkpoints written piece by piece: readable by torch and by us, guarded, complete or
rejected.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pacs_megatron.checkpoint.dist_reader import DistReader, read_metadata
from pacs_megatron.checkpoint.dist_writer import DistWriter, Piece
from pacs_megatron.checkpoint.manifest import (
    FileFacts,
    Manifest,
    check_files,
    digest_file,
    read_manifest,
    write_manifest,
)
from pacs_megatron.errors import CheckpointError

MATRIX = torch.arange(48, dtype=torch.float32).reshape(8, 6)
STACK = torch.arange(3 * 4 * 2).reshape(3, 4, 2).to(torch.bfloat16)


def write(folder: Path, *, num_files: int = 2) -> dict[str, FileFacts]:
    folder.mkdir()
    writer = DistWriter(folder, num_files=num_files)
    for row, column in ((4, 3), (0, 0), (4, 0), (0, 3)):
        writer.put(
            Piece(
                key="matrix",
                shape=(8, 6),
                offset=(row, column),
                data=MATRIX[row : row + 4, column : column + 3],
            )
        )
    for expert in range(3):
        writer.put(
            Piece(
                key="stack", shape=(3, 4, 2), offset=(expert, 0, 0), data=STACK[expert : expert + 1]
            )
        )
    writer.put(Piece(key="vector", shape=(5,), offset=(0,), data=torch.ones(5)))
    facts = writer.finish()
    writer.close()
    return facts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "dist")
    return tmp_path / "dist"


def test_pieces_come_back_whole_and_by_row(folder: Path) -> None:
    reader = DistReader(folder)
    assert reader.keys == {"matrix", "stack", "vector"}
    assert torch.equal(reader.get("matrix"), MATRIX)
    assert torch.equal(reader.get("stack"), STACK)
    assert all(torch.equal(reader.get("stack", i), STACK[i]) for i in range(3))
    assert torch.equal(reader.get("matrix", 5), MATRIX[5])
    assert (reader.shape("stack"), reader.dtype("stack")) == ((3, 4, 2), torch.bfloat16)
    with pytest.raises(CheckpointError, match="has no tensor other"):
        reader.get("other")


def test_torch_reads_it_and_we_read_torchs(folder: Path, tmp_path: Path) -> None:
    state = {
        "matrix": torch.zeros(8, 6),
        "stack": torch.zeros(3, 4, 2, dtype=torch.bfloat16),
        "vector": torch.zeros(5),
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["matrix"], MATRIX) and torch.equal(state["stack"], STACK)
    other = tmp_path / "torchs"
    dcp.save({"matrix": MATRIX, "transposed": MATRIX.t()}, checkpoint_id=other, no_dist=True)
    (other / "metadata.json").write_text((folder / "metadata.json").read_text())
    reader = DistReader(other)
    assert torch.equal(reader.get("matrix"), MATRIX) and torch.equal(
        reader.get("transposed"), MATRIX.t()
    )


def test_digests_are_those_of_the_files(tmp_path: Path) -> None:
    facts = write(tmp_path / "dist")
    assert facts.keys() == {p.name for p in (tmp_path / "dist").iterdir()}
    assert all(digest_file(tmp_path / "dist" / name) == fact for name, fact in facts.items())


def test_every_file_is_synced_to_disk_with_all_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the node after `finish` loses nothing, so each file is synced at its full size."""
    synced_bytes: dict[int, int] = {}
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        stats = os.fstat(descriptor)
        synced_bytes[stats.st_ino] = stats.st_size

    monkeypatch.setattr(os, "fsync", fsync)
    facts = write(tmp_path / "dist")

    for name, file in facts.items():
        inode = (tmp_path / "dist" / name).stat().st_ino
        assert synced_bytes.get(inode) == file.nbytes, name


def test_incomplete_and_contradicting_pieces_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    writer = DistWriter(tmp_path / "dist", num_files=1)
    writer.put(Piece(key="m", shape=(8, 6), offset=(0, 0), data=MATRIX[:4]))
    with pytest.raises(CheckpointError, match="m: 24 of 48 values"):
        writer.finish()
    with pytest.raises(CheckpointError, match="written twice"):
        writer.put(Piece(key="m", shape=(8, 6), offset=(0, 0), data=MATRIX[:4]))
    with pytest.raises(CheckpointError, match="follows one of"):
        writer.put(Piece(key="m", shape=(8, 6), offset=(4, 0), data=MATRIX[4:].double()))
    writer.close()


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch evil-was-here",)


def _drop_storage(folder: Path) -> None:
    metadata = read_metadata(folder)
    metadata.storage_data.pop(
        next(index for index in metadata.storage_data if index.fqn == "vector")
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _drop_chunk(folder: Path) -> None:
    metadata = read_metadata(folder)
    metadata.state_dict_metadata["vector"].chunks.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _truncate(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)


def _garble(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        file.write_bytes(b"\0" * file.stat().st_size)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "foreign code": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps(_Evil())),
        "it loads posix.system",
    ),
    "no index": (lambda f: (f / ".metadata").unlink(), r"\.metadata is missing"),
    "index cut short": (lambda f: os.truncate(f / ".metadata", 100), r"\.metadata is damaged"),
    "index of something else": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "expected Metadata, got dict",
    ),
    "no config": (lambda f: (f / "metadata.json").unlink(), r"metadata\.json is missing"),
    "config damaged": (
        lambda f: (f / "metadata.json").write_text("{"),
        r"metadata\.json:1: malformed JSON",
    ),
    "other backend": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "'zarr', expected 'torch_dist'",
    ),
    "file missing": (lambda f: (f / "__0_1.distcp").unlink(), r"__0_1\.distcp is missing"),
    "file truncated": (_truncate, "truncated"),
    "place of a piece lost": (_drop_storage, "no entry for a piece of vector"),
    "pieces do not cover": (_drop_chunk, "pieces of vector do not cover it"),
    "data overwritten": (_garble, "cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_rejected_in_one_line(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    damage, words = FAULTS[fault]
    damage(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        DistReader(folder).get("vector")
    assert "\n" not in str(caught.value)
    assert not Path("evil-was-here").exists()


def test_manifest_there_and_back_and_altered_files(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    data = tmp_path / "dist" / "a.bin"
    data.write_bytes(b"0123456789")
    manifest = Manifest(step=7, files={"dist/a.bin": digest_file(data)})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    check_files(tmp_path, manifest, digests=True)
    data.write_bytes(b"0123456780")
    check_files(tmp_path, manifest, digests=False)
    with pytest.raises(CheckpointError, match="was altered"):
        check_files(tmp_path, manifest, digests=True)
    data.write_bytes(b"012345678")
    with pytest.raises(CheckpointError, match="is 9 bytes, expected 10"):
        check_files(tmp_path, manifest, digests=False)
    data.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        check_files(tmp_path, manifest, digests=False)
    for text, words in (
        ("{", "malformed JSON"),
        ('{"format": 1}', "damaged"),
        (json.dumps({"format": 9, "step": 1, "files": {}}), "format 9"),
    ):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match=words):
            read_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint, or was not written completely"):
        read_manifest(tmp_path)
