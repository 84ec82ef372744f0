"""One real Slurm a test session, and how tests put this project's jobs into it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.needs import require, require_nemo_run
from tests.support.slurm import Slurm, slurm_missing, start_slurm

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two idle nodes on this host. Skips where Slurm is not installed,
    fails there under PACS_CI=1.
    """
    missing = slurm_missing()
    require(missing is None, f"a Slurm that can be started ({missing})")
    cluster = start_slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture
def repo() -> Path:
    """The checkout that jobs run from."""
    return ROOT


@pytest.fixture
def nemo_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_nemo_run()
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "nemo"))
    monkeypatch.setattr(
        sys, "stdin", io.StringIO()
    )  # its tunnel reads it, which pytest's own rejects


def job_environment(repo: Path) -> dict[str, str]:
    """Both nodes are this host: their names resolve nowhere, and gloo stays on loopback."""
    return {
        "PACS_PYTHON": sys.executable,
        "PACS_MASTER_ADDR": "127.0.0.1",
        "PACS_NODE_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(repo),
    }


def run_command(slurm: Slurm, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`pacs-megatron <words>` in `folder`, with this Slurm."""
    env = slurm.env | job_environment(ROOT) | {"NEMORUN_HOME": str(folder / "nemo")}
    command = [sys.executable, "-m", "pacs_megatron", *words]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)


def submit_by_nemo_run(
    slurm: Slurm, config: Path, *arguments: str, site: str = ""
) -> dict[str, str]:
    """`pacs-megatron submit`; the ids of its jobs by name.

    `site` is more text of the cluster's file.
    """
    cluster = config.parent / "cluster.yaml"
    text = (ROOT / "configs" / "clusters" / "local.yaml").read_text()
    cluster.write_text(f"{text}partition: debug\naccount: none\npython: [{sys.executable}]\n{site}")
    done = run_command(
        slurm, config.parent, "submit", str(config), *arguments, "--cluster", str(cluster)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if ": submitted " in line]
    return dict(re.findall(r"(\w+)=(\d+)", line))


def read_attempts(run_dir: Path) -> list[dict[str, float]]:
    """Rows of attempts.jsonl."""
    return [
        json.loads(line) for line in (run_dir / "logs" / "attempts.jsonl").read_text().splitlines()
    ]


def texts_of_jobs(folder: Path) -> str:
    """All output of the jobs that `submit_by_nemo_run` put into the queue in `folder`."""
    paths = [*(folder / "nemo").rglob("*.out"), *folder.glob("runs/*/logs/attempt_*/*.log")]
    return "\n".join(path.read_text() for path in sorted(paths))


def wait_for_rows(run_dir: Path, count: int, timeout_s: float = 600) -> None:
    """Returns when metrics.jsonl has that many rows."""
    path = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + timeout_s
    while not (path.is_file() and path.read_text().count("\n") >= count):
        assert time.monotonic() < deadline, f"no {count} rows in {path}"
        time.sleep(0.05)


def running(word: str) -> list[str]:
    """Command lines of live processes with `word` in them, but for pytest's own."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if word in line and "pytest" not in line:
            found.append(line)
    return found
