"""`submit` beside another `submit`."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pacs_megatron.launch.submit import _locked_folders


def test_one_submission_at_a_time(tmp_path: Path) -> None:
    """Both would find an empty queue."""
    run = SimpleNamespace(dir=str(tmp_path / "runs"))
    jobs: Any = [SimpleNamespace(loaded=SimpleNamespace(config=SimpleNamespace(run=run)))] * 2
    entered = threading.Event()

    def other() -> None:
        with _locked_folders(jobs[:1]):
            entered.set()

    thread = threading.Thread(target=other)
    with _locked_folders(jobs):
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(20)
    thread.join()
