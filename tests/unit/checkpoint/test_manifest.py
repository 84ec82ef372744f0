"""A checkpoint matches its folder name, its run folder and its manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.checkpoint.dist_reader import METADATA_NAME, DistReader
from pacs_megatron.checkpoint.dist_writer import DistWriter, Piece
from pacs_megatron.checkpoint.manifest import (
    Manifest,
    check_checkpoint,
    digest_file,
    read_manifest,
    write_manifest,
)
from pacs_megatron.checkpoint.names import RUN_IDENTITY_FILE, Position
from pacs_megatron.checkpoint.run_checkpoint import _run_identity
from pacs_megatron.errors import CheckpointError
from tests.support.fuzz import damaged, fuzz, json_documents


def make_checkpoint(run_dir: Path, position: Position, run: str = "a") -> Path:
    folder = run_dir / "checkpoints" / position.name
    folder.mkdir(parents=True)
    (run_dir / RUN_IDENTITY_FILE).write_text(run)
    state = folder / "state.json"
    state.write_text(json.dumps({"step": position.step, "run": run}))
    files = {"state.json": digest_file(state)}
    write_manifest(
        folder, Manifest(run=run, step=position.step, updates=position.updates, files=files)
    )
    return folder


def swap(left: Path, right: Path) -> None:
    between = left.with_name("between")
    left.rename(between)
    right.rename(left)
    between.rename(right)


@pytest.mark.parametrize("other", [Position(20), Position(10, 3)])
def test_two_swapped_checkpoints_of_a_run_are_rejected(tmp_path: Path, other: Position) -> None:
    folders = [make_checkpoint(tmp_path, Position(10)), make_checkpoint(tmp_path, other)]
    for folder in folders:
        check_checkpoint(folder)
    swap(*folders)
    for folder in folders:
        with pytest.raises(CheckpointError, match="renamed or swapped, restore the name step_0000"):
            check_checkpoint(folder)


def test_the_checkpoint_of_another_run_is_rejected(tmp_path: Path) -> None:
    ours = make_checkpoint(tmp_path / "ours", Position(10), "a")
    theirs = make_checkpoint(tmp_path / "theirs", Position(10), "b")
    swap(ours, theirs)
    with pytest.raises(CheckpointError, match=r"belongs to run b, but .*ours is run a"):
        check_checkpoint(ours)


def test_files_swapped_between_two_checkpoints_are_rejected(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path, Position(10))
    second = make_checkpoint(tmp_path, Position(20))
    swap(first / "state.json", second / "state.json")
    with pytest.raises(CheckpointError, match=r"state\.json was altered"):
        check_checkpoint(first)
    check_checkpoint(first, digests=False)  # the same size


def test_a_copied_checkpoint_is_read_anywhere_and_continues_its_run(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "old", Position(10), "a")
    check_checkpoint(folder.rename(tmp_path / "alone"))
    target = tmp_path / "new" / "checkpoints" / "step_000010"
    target.parent.mkdir(parents=True)
    check_checkpoint((tmp_path / "alone").rename(target))
    assert _run_identity(tmp_path / "new") == "a"
    assert _run_identity(tmp_path / "new") == "a"


def test_each_run_has_its_own_identity(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert _run_identity(tmp_path / "one") != _run_identity(tmp_path / "two")


def test_a_checkpoint_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, Position(10))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["run"], manifest["updates"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert check_checkpoint(folder).run is None


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b"])
def test_a_manifest_names_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path, Position(10))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 1, "xxh3_128": ""}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        read_manifest(folder)


def test_a_manifest_lists_all_weights(tmp_path: Path) -> None:
    """Otherwise a file without digest would be exported unchecked."""
    folder = make_checkpoint(tmp_path, Position(10))
    (folder / "dist").mkdir(exist_ok=True)
    (folder / "dist" / "__9_0.distcp").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"does not list .*__9_0\.distcp"):
        check_checkpoint(folder)


def test_a_damaged_memo_index_takes_no_memory(tmp_path: Path) -> None:
    """The C unpickler would allocate 64 GB for it."""
    folder = dist_folder(tmp_path)
    (folder / METADATA_NAME).write_bytes(b"\x80\x02]r\xff\xff\xff\xffa.")
    with pytest.raises(CheckpointError, match="damaged"):
        DistReader(folder)


def dist_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "dist"
    folder.mkdir()
    writer = DistWriter(folder, num_files=1)
    for key in ("model.a", "model.b"):
        writer.put(Piece(key=key, shape=(2, 3), offset=(0, 0), data=torch.ones(2, 3)))
    writer.finish()
    writer.close()
    return folder


def open_all(folder: Path) -> None:
    reader = DistReader(folder)
    for key in sorted(reader.keys):
        reader.shape(key)
        reader.get(key)


@pytest.mark.full
def test_damaged_indices_give_one_line(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = dist_folder(tmp_path_factory.mktemp("damaged"))
    document = (folder / METADATA_NAME).read_bytes()

    @fuzz
    @given(damaged(document))
    def opened(data: bytes) -> None:
        (folder / METADATA_NAME).write_bytes(data)
        try:
            open_all(folder)
        except CheckpointError as error:
            assert "\n" not in str(error)

    opened()


@fuzz
@given(
    document=json_documents()
    | st.fixed_dictionaries(
        {"format": st.just(1), "step": json_documents(), "files": json_documents()}
    )
)
def test_any_manifest_is_read_or_rejected(
    document: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "manifest.json").write_text(json.dumps(document))
    try:
        read_manifest(folder)
    except CheckpointError as error:
        assert "\n" not in str(error)
