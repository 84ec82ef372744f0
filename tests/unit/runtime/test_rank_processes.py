"""Child processes of a command."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pacs_megatron.errors import DataError
from pacs_megatron.runtime import waiting
from pacs_megatron.runtime.rank_processes import Processes


def test_a_wait_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "NOTICE_S", 0.1)
    Processes(tmp_path, "a part", lambda: time.sleep(1.0), limit_s=60).wait(DataError)
    assert caplog.records[0].getMessage().startswith("waiting for a part: ")


def test_an_error_of_a_process_and_a_limit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a part, rank 0: ZeroDivisionError"):
        Processes(tmp_path, "a part", lambda: print(1 / 0), limit_s=60).wait(DataError)
    with pytest.raises(DataError, match="a part: no end after 0 s"):
        Processes(tmp_path, "a part", lambda: time.sleep(60), limit_s=0.1).wait(DataError)
