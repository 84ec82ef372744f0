"""Shipped files by name, from a checkout and from a built package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pacs_megatron.cli import main
from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime import shipped
from pacs_megatron.runtime.command_line import path_from

ROOT = Path(__file__).parents[3]


def test_every_shipped_configuration_has_a_name() -> None:
    for kind, named in (("runs", shipped.run_file), ("clusters", shipped.cluster_file)):
        files = sorted((ROOT / "configs" / kind).glob("*.yaml"))
        assert files and [named(file.stem) for file in files] == files


def test_a_file_of_the_user_comes_before_a_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").touch()
    assert shipped.cluster_file("local") == Path("local")
    assert shipped.run_file("missing/run.yaml") == Path("missing/run.yaml")


def test_an_unknown_name_is_one_line_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"nosuch: neither a file nor a shipped configuration; .* quickstart,"
    ):
        shipped.run_file("nosuch")
    assert main(["config", "show", "nosuch"]) == ConfigError.exit_code
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["config", "show", "quickstart"]) == 0


def test_a_built_package_contains_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "egg_info",
        f"--egg-base={tmp_path}",
        "build_py",
        f"--build-lib={tmp_path}",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path / "pacs_megatron")
    for name in ("configs", "requirements", "slurm"):
        mine = shipped.shipped_folder(name)
        theirs = ROOT / name
        assert mine == tmp_path / "pacs_megatron" / name
        files = {path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()}
        assert {path.relative_to(mine) for path in mine.rglob("*") if path.is_file()} == files
    assert (tmp_path / "pacs_megatron" / "py.typed").is_file()


def test_the_home_folder_of_a_configuration_and_of_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shipped.run_file("~/run.yaml") == tmp_path / "run.yaml"
    assert path_from("~/out") == tmp_path / "out"
