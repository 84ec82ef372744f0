"""The container recipe cannot be built here: both forms of it agree, its script runs with
stand-ins.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "slurm" / "container"


def locked(name: str, python: str = "3.12") -> dict[str, str]:
    """Package -> version of a lock file, on this version of Python."""
    (file,) = (ROOT / "requirements").glob(f"{name}.*")
    pins = {}
    for line in file.read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            (version,) = pin.specifier
            pins[pin.name] = version.version
    return pins


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_requirement_is_in_the_lock_and_within_its_range(python: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert SpecifierSet(project["requires-python"]).contains(python)
    base = {
        re.sub(r"[._]", "-", name).lower(): version
        for name, version in locked("base", python).items()
    }
    for line in project["dependencies"]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(base[wanted.name.lower()]), line


def test_both_recipes_are_one() -> None:
    docker = (FOLDER / "Dockerfile").read_text()
    apptainer = (FOLDER / "pacs-megatron.def").read_text()
    image = re.search(r"^ARG BASE=(\S+)$", docker, re.MULTILINE)
    assert image is not None
    assert f"From: {image[1]}\n" in apptainer
    assert image[1].startswith("nvidia/cuda:13.")  # as PyPI's torch
    copied = set()
    for line in re.findall(r"^COPY (.*)$", docker, re.MULTILINE):
        for word in line.split()[:-1]:
            copied.add(word)
    section = apptainer.split("%files\n")[1].split("\n\n")[0]
    pairs = [line.split() for line in section.splitlines()]
    assert {source for source, _ in pairs} == copied
    for source, target in pairs:
        assert (ROOT / source).exists()
        assert target == f"/opt/pacs-megatron/{source}"
    command = "slurm/container/install.sh /opt/pacs-megatron"
    assert command in docker and command in apptainer
    variables = [re.search(r"PATH=.*PACS_SGLANG_PYTHON=\S+", text) for text in (docker, apptainer)]
    assert (
        len({found[0] for found in variables if found is not None}) == 1 and None not in variables
    )


def test_shellcheck_has_no_complaint() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed; `make install-dev` brings it")
    done = subprocess.run(
        [shellcheck, FOLDER / "install.sh"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_script_with_stand_ins(tmp_path: Path) -> None:
    """apt-get and tools/install.sh are stand-ins."""
    (tmp_path / "tools").mkdir()
    for name in ("apt-get", "rm", "tools/install.sh"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{Path(name).name} $*" >>{tmp_path}/log\n')
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(FOLDER / "install.sh"), str(tmp_path)], env=env, check=True)
    calls = (tmp_path / "log").read_text().splitlines()
    assert (
        calls[0] == "apt-get update -qq"
        and "python3.12-venv" in calls[1]
        and "libnuma1" in calls[1]
    )
    assert calls[3:] == ["install.sh gpu", "install.sh sglang-gpu"]


def test_one_torch_for_trainer_and_servers() -> None:
    """NCCL rejects a group of two versions, and torch pins NCCL: SGLang 0.5.23 requires torch
    2.14.1.
    """
    for python in ("3.12", "3.13"):
        assert locked("base", python)["torch"] == "2.14.1"
    assert locked("sglang-gpu") == {"sglang": "0.5.23"}
    assert "torch" not in locked("gpu") and "megatron-core" not in locked("gpu")


def test_rows_differ_in_megatron_core_and_torch_only() -> None:
    for name, own in (("base", {"torch", "megatron-core"}), ("sglang", {"torch", "triton"})):
        light = locked(name, "3.11")
        today = locked(name, "3.12")
        assert today == locked(name, "3.13")
        assert {pin for pin in light if light[pin] != today[pin]} == own
        assert light.keys() == today.keys()
