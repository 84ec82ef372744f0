"""A kill between the last byte of a checkpoint and its name loses nothing."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from pacs_megatron.checkpoint import run_checkpoint
from pacs_megatron.checkpoint.manifest import Manifest, write_manifest
from pacs_megatron.checkpoint.megatron_weights import find_checkpoint
from pacs_megatron.checkpoint.names import MANIFEST_NAME
from pacs_megatron.errors import CheckpointError


def _folder(run_dir: Path, name: str, step: int, marker: str) -> Path:
    folder = run_dir / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(marker)
    write_manifest(folder, Manifest(step=step, files={}))
    return folder


@pytest.mark.parametrize(("num_ranks", "expected"), [(3, [0, 1, 2]), (2, [None, None])])
def test_every_rank_gets_its_own_generators_if_their_number_is_the_same(
    tmp_path: Path, num_ranks: int, expected: list[int | None]
) -> None:
    (tmp_path / "rng").mkdir()
    for number in range(3):
        state = {"cpu": torch.tensor([number], dtype=torch.uint8)}
        save_file(state, tmp_path / "rng" / f"rank_{number:05d}.safetensors")

    found: list[int | None] = []
    for number in range(num_ranks):
        rank = SimpleNamespace(rank=number, layout=SimpleNamespace(world_size=num_ranks))
        _, state_of_rank = run_checkpoint.load_checkpoint(tmp_path, cast("Any", rank), {})
        found.append(None if state_of_rank is None else int(state_of_rank["cpu"]))
    assert found == expected


@pytest.mark.parametrize("older", ["none", "whole", "half removed"])
def test_a_whole_checkpoint_without_its_name_gets_it(older: str, tmp_path: Path) -> None:
    if older != "none":
        folder = _folder(tmp_path, "step_000002", 2, "older")
        if older == "half removed":
            (folder / MANIFEST_NAME).unlink()
    _folder(tmp_path, "step_000002.partial", 2, "newer")
    run_checkpoint.finish_interrupted(tmp_path)
    found = run_checkpoint.latest_checkpoint(tmp_path)
    assert found == tmp_path / "checkpoints" / "step_000002"
    assert (found / "state.json").read_text() == "newer"
    assert [path.name for path in found.parent.iterdir()] == ["step_000002"]


@pytest.mark.parametrize("manifest", [None, b'{"format": 1, "st'])
def test_a_half_written_one_does_not(manifest: bytes | None, tmp_path: Path) -> None:
    whole = _folder(tmp_path, "step_000002", 2, "older")
    partial = _folder(tmp_path, "step_000003.partial", 3, "newer")
    if manifest is None:
        (partial / MANIFEST_NAME).unlink()
    else:
        (partial / MANIFEST_NAME).write_bytes(manifest)
    run_checkpoint.finish_interrupted(tmp_path)
    assert run_checkpoint.latest_checkpoint(tmp_path) == whole


def test_a_copy_of_another_step_replaces_nothing(tmp_path: Path) -> None:
    whole = _folder(tmp_path, "step_000003", 3, "its own")
    _folder(tmp_path, "step_000003.partial", 2, "a copy of step 2")
    run_checkpoint.finish_interrupted(tmp_path)
    assert run_checkpoint.latest_checkpoint(tmp_path) == whole
    assert (whole / "state.json").read_text() == "its own"


STATE = {"step": 3, "policy_version": 6, "driver": {}, "row": None, "has_reference": False}


@pytest.mark.parametrize(
    "change",
    [
        *({}, *({"step": wrong} for wrong in (-1, 4, 10**30, "three")), {"policy_version": -1}),
        *({"policy_version": 2**63}, {"driver": []}, {"row": 7}, {"has_reference": None}),
    ],
)
def test_a_state_fits_its_folder(change: dict[str, object], tmp_path: Path) -> None:
    folder = _folder(tmp_path, "step_000003", 3, json.dumps(STATE | change))
    if not change:
        assert run_checkpoint.read_state(folder) == STATE
        return
    with pytest.raises(CheckpointError, match=rf"state.json: {next(iter(change))} is .*restore it"):
        run_checkpoint.read_state(folder)


def test_a_file_with_the_name_of_a_checkpoint_is_rejected(tmp_path: Path) -> None:
    _folder(tmp_path, "step_000003", 3, "its own")
    (tmp_path / "checkpoints" / "step_000004").write_text("")
    with pytest.raises(CheckpointError, match="step_000004 is not a folder"):
        run_checkpoint.finish_interrupted(tmp_path)


def test_a_run_without_checkpoints_has_nothing_to_finish(tmp_path: Path) -> None:
    run_checkpoint.finish_interrupted(tmp_path)
    assert run_checkpoint.latest_checkpoint(tmp_path) is None


def test_what_stays_when_there_are_more(tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    for step in (2, 4, 6):
        _folder(tmp_path, f"step_{step:06d}", step, "")
    _folder(tmp_path, "step_000006_plus_03", 6, "")
    _folder(tmp_path, "step_000006_plus_11", 6, "")
    run_checkpoint._prune(tmp_path, 2)
    # In the middle of a step only the newest is of use, and it takes no place of the others.
    assert names() == ["step_000004", "step_000006", "step_000006_plus_11"]
    found = run_checkpoint.latest_checkpoint(tmp_path)
    assert found is not None and found.name == "step_000006_plus_11"
    assert find_checkpoint(tmp_path, None).name == "step_000006"
    with pytest.raises(CheckpointError, match="there are 4, 6"):
        find_checkpoint(tmp_path, 5)
    _folder(tmp_path, "step_000007", 7, "")
    run_checkpoint._prune(tmp_path, 2)
    assert names() == ["step_000006", "step_000007"]


def test_a_checkpoint_that_is_kept_elsewhere_stays_there(tmp_path: Path) -> None:
    for step in (1, 2):
        _folder(tmp_path, f"step_{step:06d}", step, "")
    link = tmp_path / "checkpoints" / "step_000001"
    elsewhere = tmp_path / "elsewhere"
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    before = sorted(path.name for path in elsewhere.rglob("*"))
    run_checkpoint._prune(tmp_path, 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]
    assert before and sorted(path.name for path in elsewhere.rglob("*")) == before


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        CheckpointException("", {1: (FULL, StackSummary())}),
        SafetensorError("Error while serializing: No space left on device"),
        RuntimeError("basic_ios::clear: iostream error"),
        RuntimeError(
            "[enforce fail at inline_container.cc:783] . PytorchStreamWriter failed writing file "
            "data/3"
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_is_a_checkpoint_error_of_each_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    _folder(tmp_path, "step_000004", 4, "a")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(run_checkpoint, "disk_error", lambda _folder: FULL)
    final = tmp_path / "checkpoints" / "step_000006"
    with pytest.raises(CheckpointError) as raised:
        run_checkpoint._with_disk_errors(final, fail)
    text = str(raised.value)
    assert text.startswith(f"{final} was not saved (No space left on device)") and text.endswith(
        "step_000004"
    )


def test_errors_of_other_ranks_keep_their_class(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()

    def fail() -> None:
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed"):
        run_checkpoint._with_disk_errors(tmp_path / "checkpoints" / "step_000006", fail)


def test_a_record_of_noise_is_named(tmp_path: Path) -> None:
    """Its manifest can be made to fit."""
    (tmp_path / "buffer.json").write_text("{}")
    (tmp_path / "buffer.safetensors").write_bytes(b"noise" * 9)
    with pytest.raises(CheckpointError, match=r"buffer\.safetensors is malformed"):
        run_checkpoint.read_record(tmp_path)
