"""The export at the end of a run replaces an earlier one and keeps the user's files beside it."""

from __future__ import annotations

from pathlib import Path

from pacs_megatron.training import export


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    before = tmp_path / "hf.before"
    target = tmp_path / "hf"
    for folder in (before, target):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    (target / "model.safetensors").write_text("new")
    for name in ("notes.txt", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (before / name).write_text("old")
    (before / "plots").mkdir()
    (before / "plots" / "a.png").write_text("mine")
    export._remove_previous(before, target)
    found = {
        str(path.relative_to(target)): path.read_text()
        for path in target.rglob("*")
        if path.is_file()
    }
    assert found == {
        "config.json": "hf",
        "model.safetensors": "new",
        "notes.txt": "old",
        "plots/a.png": "mine",
    }
    assert not before.exists()
