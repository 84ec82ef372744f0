"""A second run in a folder that is in use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pacs_megatron.errors import ExitCode
from pacs_megatron.runtime.run_lock import RunLock
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run


def test_a_second_run_is_rejected_and_changes_nothing(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    folder = tmp_path / "runs" / "tiny"
    with RunLock(folder, "train"):
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        done = subprocess.run(
            [sys.executable, "-m", "pacs_megatron.training.main", str(config)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == ExitCode.MISCONFIGURED, done.stderr
        assert (
            "is in use by `train`" in done.stderr.splitlines()[-1]
            and "Traceback" not in done.stderr
        )
        assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "run.lock"]
        assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'
