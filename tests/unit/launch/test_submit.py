"""`submit` beside another `submit`."""

from __future__ import annotations

import threading
from pathlib import Path

from pacs_megatron.launch.submit import _alone


def test_one_submission_at_a_time(tmp_path: Path) -> None:
    """Both would find an empty queue."""
    entered = threading.Event()

    def other() -> None:
        with _alone(tmp_path / "home"):
            entered.set()

    thread = threading.Thread(target=other)
    with _alone(tmp_path / "home"):
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(20)
    thread.join()
