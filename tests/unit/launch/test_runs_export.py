"""`export` into a run folder takes its lock; an export elsewhere does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.launch.runs import export
from pacs_megatron.runtime.run_lock import FolderInUseError, RunLock


def test_export_takes_the_lock_of_the_run_it_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step_000003"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    monkeypatch.setattr("pacs_megatron.convert.convert.megatron_to_hf", lambda *_, **__: "exported")
    with RunLock(tmp_path / "run", "train"):
        with pytest.raises(FolderInUseError, match=r"is in use by `train` .*another --out"):
            export(tmp_path / "run", step=None, out=None)
        assert export(tmp_path / "run", step=None, out=tmp_path / "out") == "exported"
    assert export(tmp_path / "run", step=None, out=None) == "exported"
