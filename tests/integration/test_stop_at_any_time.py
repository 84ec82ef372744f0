"""`timeout` ends a run at any moment of its life, start-up included, and leaves no process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pacs_megatron.checkpoint.manifest import check_checkpoint
from pacs_megatron.checkpoint.names import whole_checkpoints
from pacs_megatron.runtime.run_lock import lock_owner
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

LEAD_S = 60.0


def processes_of(folder: Path) -> list[list[str]]:
    """Command lines of live processes of a run in `folder`: all have one of its files as an argument or variable."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(folder) in word for word in words):
            found.append(words)
    return found


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_timeout_ends_a_run_in_every_phase(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model", num_hidden_layers=2, vocab_size=262))
    run_dir = tmp_path / "runs" / "tiny"
    command = [sys.executable, "-m", "pacs_megatron", "train", str(config), "run.steps=100000"]
    command.append(f"resources.signal_lead_s={LEAD_S:.0f}")
    for tenths in (1, 3, 7, 12, 20, 30, 40, 50, 60, 70, 85, 100, 120, 150, 200):
        done = subprocess.run(
            ["timeout", f"{tenths / 10}", *command], capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 124, done.stderr
        assert "Traceback" not in done.stderr and "InternalError" not in done.stderr, done.stderr
        # `timeout` waits for the launcher; everything else ends with it.
        deadline = time.monotonic() + LEAD_S
        while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, (tenths, left, done.stderr)
        assert lock_owner(run_dir) is None
        for _, folder in whole_checkpoints(run_dir):
            check_checkpoint(folder)
    assert whole_checkpoints(run_dir)
