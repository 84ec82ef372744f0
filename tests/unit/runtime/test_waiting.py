"""A wait that takes long is reported; a short one is not."""

from __future__ import annotations

import time

import pytest

from pacs_megatron.runtime import waiting
from pacs_megatron.runtime.waiting import report_wait


def test_a_long_wait_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waiting, "NOTICE_S", 0.05)
    deadline = time.monotonic() + 60
    with report_wait("for 4 ranks"):
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    assert caplog.records[0].getMessage().startswith("waiting for 4 ranks: ")


def test_a_short_wait_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with report_wait("for 4 ranks"):
        pass
    assert not caplog.records
