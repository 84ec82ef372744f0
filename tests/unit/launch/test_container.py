"""The container recipe cannot be built here: its versions are the locks', its script runs with stand-ins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "slurm" / "container"
KEPT = {"torch", "numpy", "setuptools"}
"""The base image's own."""


def locked(name: str) -> dict[str, str]:
    """Package -> version of a lock file."""
    (file,) = (ROOT / "requirements").glob(f"{name}.*")
    lines = file.read_text().splitlines()
    return dict(line.split("==", 1) for line in lines if re.match(r"[A-Za-z0-9]", line))


def test_what_it_installs_are_the_locks() -> None:
    done = subprocess.run(
        ["bash", str(FOLDER / "install.sh"), str(ROOT), "--list"], capture_output=True, text=True, check=True
    )
    found = dict(line.split("==", 1) for line in done.stdout.split())
    base, sglang = locked("base"), locked("sglang-gpu")
    assert found.pop("sglang") == sglang["sglang"]
    assert found == {name: version for name, version in base.items() if name not in KEPT}
    assert {"megatron-core", "transformers", "datasets", "math-verify"} <= set(found)


def test_every_requirement_is_in_the_lock_and_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {re.sub(r"[._]", "-", name).lower(): version for name, version in locked("base").items()}
    for line in project["dependencies"]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(base[wanted.name.lower()].split("+")[0]), line


def test_both_recipes_are_one() -> None:
    docker, apptainer = (FOLDER / "Dockerfile").read_text(), (FOLDER / "pacs-megatron.def").read_text()
    image = re.search(r"^ARG BASE=(\S+)$", docker, re.MULTILINE)
    assert image is not None
    assert f"From: {image[1]}\n" in apptainer
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", image[1])
    copied = {word for line in re.findall(r"^COPY (.*)$", docker, re.MULTILINE) for word in line.split()[:-1]}
    section = apptainer.split("%files\n")[1].split("\n\n")[0]
    pairs = [line.split() for line in section.splitlines()]
    assert {source for source, _ in pairs} == copied
    for source, target in pairs:
        assert (ROOT / source).exists()
        assert target == f"/opt/pacs-megatron/{source}"
    command = "slurm/container/install.sh /opt/pacs-megatron"
    assert command in docker and command in apptainer
    variables = (re.search(r"PACS_SGLANG_PYTHON=\S+", text) for text in (docker, apptainer))
    assert len({found[0] for found in variables if found is not None}) == 1


def test_shellcheck_has_no_complaint() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed; `make install-dev` brings it")
    done = subprocess.run([shellcheck, FOLDER / "install.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("engine", ["2.10.0+abc", "2.7.0"])
def test_the_script_with_stand_ins(engine: str, tmp_path: Path) -> None:
    """pip, SGLang's environment, Transformer Engine and Megatron are stand-ins; the check at the end is the real one."""
    log = tmp_path / "log"
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    sglang = tmp_path / "sglang"
    script = (FOLDER / "install.sh").read_text().replace("/opt/sglang", str(sglang))
    (tmp_path / "install.sh").write_text(script)
    (bin_folder / "python").write_text(
        f'#!/bin/bash\nif [ "$1" = -m ]; then echo "${{PIP_CONSTRAINT-unset}}|$*" >>{log}; '
        f'[ "${{!#}}" = /dev/stdin ] && cat >>{log}\n'
        f'if [ "$2" = virtualenv ]; then mkdir -p {sglang}/bin; cp "$0" {sglang}/bin/python; fi; exit 0; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    (bin_folder / "python").chmod(0o755)
    package = tmp_path / "modules" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = '{engine}'\n")
    (package / "pytorch.py").write_text("")
    megatron = tmp_path / "modules" / "megatron" / "core"  # the real one would look into Transformer Engine
    megatron.mkdir(parents=True)
    (megatron / "__init__.py").write_text(f"__version__ = '{locked('base')['megatron-core']}'\n")
    env = {
        **os.environ,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path / 'modules'}:{ROOT}",
        "PIP_CONSTRAINT": "/etc/pip/constraint.txt",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        ["bash", str(tmp_path / "install.sh"), str(ROOT)], capture_output=True, text=True, env=env, check=False
    )
    calls = [line for line in log.read_text().splitlines() if "|" in line]
    assert all(line.startswith("|") for line in calls)  # NGC's constraints are off
    assert [line.split("-m ")[1] for line in calls] == [
        "pip install --no-deps -r /dev/stdin",
        f"pip install --no-deps {ROOT}",
        "pip install virtualenv",
        f"virtualenv --quiet {sglang}",
        f"pip install sglang=={locked('sglang-gpu')['sglang']}",
    ]
    assert "megatron-core==" in log.read_text() and "\ntorch==" not in log.read_text()
    if engine == "2.7.0":
        assert done.returncode == 1 and "Transformer Engine 2.7.0; megatron-core 0.16.1 needs" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert f"Transformer Engine {engine}, megatron-core 0.16.1" in done.stdout
