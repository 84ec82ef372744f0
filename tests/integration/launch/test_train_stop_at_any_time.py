"""`timeout` ends a run at any moment of its life, start-up included, and leaves no process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pacs_megatron.checkpoint.manifest import check_checkpoint
from pacs_megatron.checkpoint.names import whole_checkpoints
from pacs_megatron.errors import ExitCode
from pacs_megatron.runtime.run_lock import lock_owner
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

LEAD_S = 60.0


def processes_of(folder: Path) -> list[list[str]]:
    """Command lines of live processes of a run in `folder`: all have one of its files as an
    argument or variable.
    """
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(
            str(folder) in word for word in words
        ):
            found.append(words)
    return found


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_timeout_ends_a_run_in_every_phase(tmp_path: Path) -> None:
    config = write_tiny_run(
        tmp_path, make_tiny_qwen3(tmp_path / "model", num_hidden_layers=2, vocab_size=262)
    )
    run_dir = tmp_path / "runs" / "tiny"
    command = [sys.executable, "-m", "pacs_megatron", "train", str(config), "run.steps=100000"]
    command.append(f"resources.signal_lead_s={LEAD_S:.0f}")
    begin = time.monotonic()
    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log)
    while not whole_checkpoints(run_dir):
        assert first.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    start_s = time.monotonic() - begin
    first.send_signal(signal.SIGTERM)
    assert first.wait(LEAD_S) == ExitCode.PREEMPTED
    for tenths in range(0, 16, 2):
        delay_s = max(0.1, start_s * tenths / 10)
        done = subprocess.run(
            ["timeout", f"{delay_s:.1f}", *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 124, done.stderr
        assert "Traceback" not in done.stderr and "InternalError" not in done.stderr, done.stderr
        # `timeout` waits for the launcher; everything else ends with it.
        deadline = time.monotonic() + LEAD_S
        while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, (delay_s, left, done.stderr)
        assert lock_owner(run_dir) is None
        for _, folder in whole_checkpoints(run_dir):
            check_checkpoint(folder)
