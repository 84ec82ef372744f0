"""The self-test's commands, as far as they can be seen without running it (tests/integration/slurm does)."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.config.rollout_options import MAX_SGLANG_STOPS
from pacs_megatron.launch.selftest import SAMPLING, _in_tasks, main, make_folder

PROGRAM = ["/bare/python", "-m", "pacs_megatron", "train", "run.yaml"]


def test_tasks_run_the_sites_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACS_PYTHON", raising=False)
    monkeypatch.delenv("PACS_SRUN_ARGS", raising=False)
    assert _in_tasks(PROGRAM) == PROGRAM
    monkeypatch.setenv("PACS_PYTHON", "apptainer exec --nv image.sif python")
    monkeypatch.setenv("PACS_SRUN_ARGS", "--cpu-bind=cores")
    assert _in_tasks(PROGRAM) == ["--cpu-bind=cores", "apptainer", "exec", "--nv", "image.sif", "python", *PROGRAM[1:]]


def test_sglang_takes_its_stop_strings() -> None:
    stops = SAMPLING["stop"]
    assert isinstance(stops, list)
    assert len(stops) <= MAX_SGLANG_STOPS


def test_no_folder_of_others_is_emptied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for folder in (tmp_path, tmp_path / "thesis.tex"):
        assert main([str(folder), "--ranks=1"]) == 2
        assert f"{folder} is not empty and not of a self-test; name a new" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    make_folder(tmp_path / "new" / "folder")
    (tmp_path / "new" / "folder" / "certificate.json").touch()
    make_folder(tmp_path / "new" / "folder")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [".pacs-selftest"]
