"""Outputs that the user named: they replace an earlier output, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pacs_megatron.errors import CheckpointError, ConfigError
from pacs_megatron.runtime.files import is_file, remove, write_atomically, write_outputs

OUTPUTS = {
    "json": (
        b'{"tasks": ["math"], "differences": []}',
        b'{"tasks": ["aime24"], "differences": []}',
    ),
    "latex": (b"\\begin{tabular}{lr}\n", b"\\begin{tabular}{lrrr}\n"),
    "csv": (b"method,task,mean\npacs,math,0.5\n", b"method,task,mean\ngrpo,aime,0.1\n"),
    "archive": (
        b"PK\x03\x04\x14\x00\x00\x00\x08\x00\x01\x02\x99",
        b"PK\x03\x04\x14\x00\x00\x00\x08\x00\x01\x02\x55",
    ),
    "page": (
        b"<!doctype html><html><title>Comparison: a</title>",
        b"<!doctype html><html><title>Comparison: b</title>",
    ),
    "certificate": (
        b'{\n "direction": "verify",\n "format": 1}',
        b'{\n "direction": "verify",\n "format": 2}',
    ),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_another_result_replaces_an_earlier_one(tmp_path: Path, kind: str) -> None:
    first, second = OUTPUTS[kind]
    path = tmp_path / "new" / "out"
    for content in (first, second):
        write_outputs([(path, content)])
        assert path.read_bytes() == content


def test_no_output_is_written_if_one_would_replace_another_file(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b'{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl exists and is not an earlier output"):
        write_outputs([(tmp_path / "page.html", b"<!doctype html>"), (metrics, OUTPUTS["json"][0])])
    assert metrics.read_bytes() == b'{"step": 1}\n'
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("before", "content"),
    [
        (b"<!doctype html><html><title>tiny</title>", OUTPUTS["page"][0]),
        (b"<!doctype html><html><title>Diversity</title>", OUTPUTS["page"][0]),
        (b'{\n "direction": "hf-to-megatron",', OUTPUTS["certificate"][0]),
        (b'{\n "direction": "verify",', b'{\n "result": "green"}'),
    ],
)
def test_an_output_of_another_command_is_kept(
    tmp_path: Path, before: bytes, content: bytes
) -> None:
    path = tmp_path / "out"
    path.write_bytes(before)
    with pytest.raises(ConfigError, match="not an earlier output of this command"):
        write_outputs([(path, content)])
    assert path.read_bytes() == before


def test_one_file_for_two_outputs(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("page")
    with pytest.raises(ConfigError, match="given twice"):
        write_outputs([(tmp_path / "page", b"x"), (tmp_path / "link", b"x")])
    assert not (tmp_path / "page").exists()


def test_a_pipe_a_folder_and_a_lost_link_are_not_absent(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert not is_file(path)
    for make in (
        os.mkfifo,
        os.mkdir,
        lambda found: os.symlink("nowhere", found),
        lambda found: os.symlink("file", found),
    ):
        make(path)
        with pytest.raises(CheckpointError, match="not a regular file"):
            is_file(path, CheckpointError)
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
    path.write_text("x")
    assert is_file(path)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "page", [b"x"])
    with pytest.raises(ConfigError):
        write_atomically(tmp_path / "rows", (_raise(number) for number in range(3)))
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def _raise(number: int) -> bytes:
    if number:
        raise ConfigError("the second row is wrong")
    return b"x"


@pytest.mark.parametrize("kind", ["folder", "file", "link to a folder", "lost link"])
def test_remove(kind: str, tmp_path: Path) -> None:
    """The target of a link stays."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    path = tmp_path / "x"
    if kind == "folder":
        (path / "y").mkdir(parents=True)
    elif kind == "file":
        path.touch()
    else:
        path.symlink_to("mine" if kind == "link to a folder" else "nowhere")
    remove(path)
    assert not path.is_symlink() and not path.exists()
    assert (tmp_path / "mine" / "notes").exists()
