"""The start of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.errors import ConfigError
from pacs_megatron.training import main


def test_rank_0_reports_at_once_that_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its wait begins up to 9 s after the launcher's last report."""

    def fail(*_: object) -> None:
        raise ConfigError("x")

    monkeypatch.setattr(main, "_build", fail)
    loaded: Any = None
    for rank, expected in ((0, ["loading torch and Megatron"]), (1, [])):
        caplog.clear()
        with caplog.at_level("INFO"), pytest.raises(ConfigError):
            main._train(loaded, tmp_path, rank)
        own = [record.getMessage() for record in caplog.records if record.name == main.__name__]
        assert own == expected
