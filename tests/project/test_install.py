"""tools/install.sh with replacements of interpreters and pip: which Python and which pins an
environment gets.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERPRETER = """#!/bin/sh
# An interpreter of Python VERSION, and its pip; each installation is a line of the log.
case "$*" in
    *print*version_info*) echo VERSION ;;
    *_base_executable*) echo "$0" ;;
    *sysconfig*) echo "$PWD/site" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip config list") echo "global.index-url='here'" ;;
    # An index with a CPU build of torch has a file of this name.
    *dry-run*+cpu*) test -e "$PWD/cpu-build" ;;
    "-m pip install "*) echo "VERSION $*" >>"$PWD/log" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("tools", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def add_python(checkout: Path, name: str, version: str) -> Path:
    path = checkout / "bin" / name
    path.write_text(INTERPRETER.replace("VERSION", version))
    path.chmod(0o755)
    return path


def install(checkout: Path, *names: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{checkout / 'bin'}:/usr/bin:/bin",
        "HOME": str(checkout),
        **variables,
    }
    # The host's interpreters are hidden: names without a replacement do not exist.
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        if not (checkout / "bin" / name).exists():
            add_python(checkout, name, "none")
    return subprocess.run(
        ["bash", "tools/install.sh", *names],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def log(checkout: Path) -> str:
    return (checkout / "log").read_text()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"python3": "3.11", "python3.12": "3.12", "python3.13": "3.13"}, "3.11"),
        ({"python3": "3.12", "python3.11": "3.11", "python3.13": "3.13"}, "3.12"),
        ({"python3": "3.10", "python3.11": "3.11", "python3.12": "3.12"}, "3.12"),
        ({"python3": "3.14", "python3.12": "3.12", "python3.13": "3.13"}, "3.13"),
        ({"python3.11": "3.11"}, "3.11"),
    ],
    ids=["active-3.11", "active-3.12", "too-old", "too-new", "none-active"],
)
def test_the_active_python_decides_then_the_newest_by_name(
    names: dict[str, str], expected: str, checkout: Path
) -> None:
    for name, version in names.items():
        add_python(checkout, name, version)
    done = install(checkout, "base")
    assert done.returncode == 0, done.stderr
    torch = "2.13.0" if expected == "3.11" else "2.14.1"
    assert f"{expected} -m pip install -q -c requirements/base.lock torch=={torch}\n" in log(
        checkout
    )


def test_a_lock_is_installed_once(checkout: Path) -> None:
    add_python(checkout, "python3", "3.12")
    install(checkout, "base", "dev")
    first = log(checkout)
    assert "requirements/dev.lock" in first and "-e ." in first
    install(checkout, "base", "dev")
    assert log(checkout) == first


def test_another_active_python_keeps_an_environment_and_the_variable_replaces_it(
    checkout: Path,
) -> None:
    add_python(checkout, "python3", "3.11")
    install(checkout, "base")
    add_python(checkout, "python3", "3.12")
    assert install(checkout, "base").stderr == ""
    named = add_python(checkout, "mine", "3.12")
    done = install(checkout, "base", PYTHON=str(named))
    assert f".venv with {named}" in done.stderr
    assert "3.12 -m pip install -q -c requirements/base.lock torch==2.14.1\n" in log(checkout)


def test_sglang_follows_the_row_of_the_package(checkout: Path) -> None:
    add_python(checkout, "python3", "3.12")
    add_python(checkout, "python3.11", "3.11")
    install(checkout, "base", PYTHON=str(checkout / "bin" / "python3.11"))
    done = install(checkout, "sglang")
    assert ".venv-sglang with " in done.stderr and "python3.11" in done.stderr
    assert "-c requirements/sglang.lock torch==2.13.0\n" in log(checkout)


@pytest.mark.parametrize(("active", "other"), [("3.11", "3.12"), ("3.12", "3.11")])
def test_the_other_row(active: str, other: str, checkout: Path) -> None:
    python = add_python(checkout, "python3", active)
    install(checkout, "base")
    add_python(checkout, f"python{other}", other)
    done = install(checkout, "other", PYTHON=str(python))
    assert f".venv-other with {checkout}/bin/python{other}" in done.stderr
    torch = "2.13.0" if other == "3.11" else "2.14.1"
    assert f"{other} -m pip install -q -c requirements/base.lock torch=={torch}\n" in log(checkout)
    assert f"{other} -m pip install -q -r requirements/dev.lock\n" in log(checkout)


def test_gpu_environments_need_todays_stack(checkout: Path) -> None:
    add_python(checkout, "python3", "3.11")
    done = install(checkout, "gpu")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert ".venv-gpu needs Python 3.13 or 3.12" in line and "set PYTHON=" in line


def test_the_test_row_of_transformer_engine_needs_its_pack(checkout: Path) -> None:
    done = install(checkout, "te")
    assert done.returncode == 2 and "PACS_TE_PACK" in done.stderr


def test_pins_of_the_gpu_environment(checkout: Path) -> None:
    add_python(checkout, "python3.13", "3.13")
    done = install(checkout, "gpu")
    assert done.returncode == 0, done.stderr
    assert "3.13 -m pip install -q -c .venv-gpu/gpu.lock torch==2.14.1\n" in log(checkout)
    assert "transformer_engine_torch==2.20.2\n" in log(checkout)
    lines = (checkout / ".venv-gpu" / "gpu.lock").read_text().splitlines()
    pins = [line for line in lines if line.startswith("setuptools==")]
    assert pins == ["setuptools==81.0.0"] and any(line.startswith("pytest==") for line in lines)


def pack_of(folder: Path) -> Path:
    """A pack of Transformer Engine (docs/compatibility.md) without content."""
    library = folder / "transformer_engine" / "wheel_lib" / "empty"
    library.parent.mkdir(parents=True)
    library.touch()
    for command in (
        ["tar", "-cJf", "transformer_engine-1.tar.xz", "transformer_engine"],
        ["cp", "transformer_engine-1.tar.xz", "libtransformer_engine-1.so.xz"],
    ):
        subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.mark.parametrize(
    ("name", "torch"), [("base", "2.14.1+cpu"), ("gpu", "2.14.1"), ("te", "2.11.0")]
)
def test_a_cpu_build_is_chosen_where_nothing_needs_the_cuda_build(
    name: str, torch: str, checkout: Path
) -> None:
    """The extension of Transformer Engine is compiled for the CUDA build."""
    if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        pytest.skip("this host has an NVIDIA driver, where no CPU build is chosen")
    add_python(checkout, "python3", "3.12")
    (checkout / "cpu-build").touch()
    (checkout / "site").mkdir()
    done = install(checkout, name, PACS_TE_PACK=str(pack_of(checkout / "pack")))
    assert done.returncode == 0, done.stderr
    assert f" torch=={torch}\n" in log(checkout)


def test_every_call_of_pip_gets_the_users_arguments(checkout: Path) -> None:
    add_python(checkout, "python3", "3.12")
    install(checkout, "gpu", PIP_ARGS="--index-url https://mirror.example/simple")
    calls = [line for line in log(checkout).splitlines() if " -e ." not in line]
    assert len(calls) == 4 and all("--index-url https://mirror.example" in call for call in calls)


def test_every_quiet_call_that_takes_long_reports_its_wait() -> None:
    script = (ROOT / "tools" / "install.sh").read_text().replace("\\\n", " ")
    found = 0
    for line in script.splitlines():
        is_long = re.search(r"-m (pip (install -q|check)|venv)|import sgl_kernel", line)
        if is_long and not line.lstrip().startswith("#"):
            found += 1
            assert "with_time" in line, line
    assert found >= 8


def test_a_long_wait_is_reported_and_keeps_the_exit_code(tmp_path: Path) -> None:
    script = (ROOT / "tools" / "install.sh").read_text()
    start = script.index("with_time() {")
    function = script[start : script.index("\n}\n", start) + 3]
    lines = [
        "set -euo pipefail",
        function,
        "sleep() { command sleep 0.05; }",
        "code=0",
        "waits() { until grep -q waiting log; do command sleep 0.05; done; return 3; }",
        "with_time 'pip to end' waits 2>log || code=$?",
        "exit $code",
    ]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=tmp_path, check=False)
    assert done.returncode == 3
    text = (tmp_path / "log").read_text()
    assert text.startswith("install: waiting for pip to end: ")
