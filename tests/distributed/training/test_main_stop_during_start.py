"""A stop request before the first step ends a rank at once, while it waits for ranks or for the
driver.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pacs_megatron.errors import ExitCode
from tests.support.ranks import free_port
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

SLOW_IMPORT = "import time\ntime.sleep(600)\n"


@pytest.mark.parametrize("by", ["signal", pytest.param("file", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "waits_for", ["other ranks", pytest.param("driver", marks=pytest.mark.full)]
)
def test_a_stop_request_during_start_ends_the_rank(tmp_path: Path, waits_for: str, by: str) -> None:
    config = write_tiny_run(
        tmp_path, make_tiny_qwen3(tmp_path / "model", num_hidden_layers=2, vocab_size=262)
    )
    run_dir = tmp_path / "runs" / "tiny"
    environ = dict(os.environ)
    overrides = ["parallel.tp=1"]
    log = run_dir / "logs" / "driver.log"
    if waits_for == "other ranks":
        environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        overrides = []
    else:
        (tmp_path / "reward.py").write_text(SLOW_IMPORT)
    command = [sys.executable, "-m", "pacs_megatron.training.main", str(config), *overrides]
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 600
        while not log.exists() or (
            waits_for == "driver" and "reward workers" not in log.read_text()
        ):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        if by == "file":
            (run_dir / "STOP").touch()
        else:
            process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=600)  # a limit reached has another last line
    finally:
        process.kill()
        process.wait()
    reason = "SIGTERM" if by == "signal" else "file STOP"
    assert (
        error.splitlines()[-1]
        == f"{reason} before training: nothing to save; there is no checkpoint"
    )
    assert process.returncode == ExitCode.PREEMPTED
    assert (run_dir / "exit_code").read_text() == "75\n"
    assert (run_dir / "run.lock").read_bytes() == b""


def test_an_error_of_another_rank_is_no_preemption(tmp_path: Path) -> None:
    """torchrun ends rank 0 by SIGTERM when another rank has failed: a job would be requeued for a
    user's mistake.
    """
    config = write_tiny_run(
        tmp_path, make_tiny_qwen3(tmp_path / "model", num_hidden_layers=2, vocab_size=262)
    )
    run_dir = tmp_path / "runs" / "tiny"
    environ = os.environ | {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(free_port())}

    def start(rank: int, *overrides: str) -> subprocess.Popen[str]:
        code = (
            "import sys\nfrom pacs_megatron.training import main\nmain._PRINT_AFTER_S = "
            "0.5\nmain.main(sys.argv[1:])"
        )
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-c", code, str(config), *overrides]
        return subprocess.Popen(command, env=environ | place, stderr=subprocess.PIPE, text=True)

    first = start(0)
    try:
        deadline = time.monotonic() + 600
        while not (run_dir / "logs" / "driver.log").exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        other = start(1, "model.path=an/absent/folder")
        _, error = other.communicate(timeout=600)
        assert other.returncode == ExitCode.FAILED, error
        first.send_signal(signal.SIGTERM)
        _, error = first.communicate(timeout=600)
    finally:
        first.kill()
        first.wait()
    assert (
        error.splitlines()[-1]
        == "another rank failed before training: nothing to save; there is no checkpoint"
    )
    assert first.returncode == ExitCode.FAILED
    assert (run_dir / "exit_code").read_text() == "1\n"
