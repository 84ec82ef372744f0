"""A wheel in an empty environment, without the checkout: every command that a user runs first."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "source")], check=True)
    for name in subprocess.run(
        ["git", "ls-files", "-z", "-m", "-o", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(folder / "source"),
    ]
    subprocess.run([*pip, *build], check=True)
    [wheel] = folder.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True
    )
    python = folder / "venv" / "bin" / "python"
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    # A path file adds the folder of the dependencies and does not read the path file of the
    # editable install in it.
    [site] = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv"


def run(environment: Path, folder: Path, *arguments: str, code: int = 0) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    command = [str(environment / "bin" / "pacs-megatron"), *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_the_package_is_the_wheels(environment: Path, tmp_path: Path) -> None:
    code = "import pacs_megatron, sys; sys.exit(not pacs_megatron.__file__.startswith(sys.prefix))"
    subprocess.run([environment / "bin" / "python", "-P", "-c", code], cwd=tmp_path, check=True)


def test_commands_that_need_no_run(environment: Path, tmp_path: Path) -> None:
    assert "verbs" in run(environment, tmp_path, "--help")
    assert "GiB" in run(environment, tmp_path, "plan", "pacs-qwen3-8b-1n8g-tp2")
    folder = environment / "lib"
    assert str(folder) in run(environment, tmp_path, "doctor")
    words = (
        "submit",
        "pacs-qwen3-8b-1n8g-tp2",
        f"run.dir={tmp_path}",
        "--cluster",
        "example-bare",
        "--dry-run",
    )
    assert "#SBATCH" in run(environment, tmp_path, *words)


def test_every_batch_script_is_there(environment: Path) -> None:
    [slurm] = (environment / "lib").glob("python*/site-packages/pacs_megatron/slurm")
    assert {path.name for path in slurm.glob("*.sbatch")} == {
        path.name for path in (ROOT / "slurm").glob("*.sbatch")
    }


def test_a_small_run_trains(environment: Path, tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=1, vocab_size=262)
    run(environment, tmp_path, "train", str(write_tiny_run(tmp_path, model)), "parallel.tp=1")
    assert (tmp_path / "runs" / "tiny" / "hf" / "model.safetensors").is_file()
