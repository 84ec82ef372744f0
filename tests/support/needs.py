"""Programs and environments that a test needs: a skip with the reason, or a failure in CI."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

SGLANG_PYTHON = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"


def require(available: bool, what: str) -> None:
    """Skips the test where `what` is missing.

    Under PACS_CI=1 (`.ci/run`) it fails: a skip would hide the loss.
    """
    if available:
        return
    if os.environ.get("PACS_CI") == "1":
        pytest.fail(f"PACS_CI=1, but {what} is missing")
    pytest.skip(f"{what} is missing")


def require_sglang() -> Path:
    """The interpreter of SGLang's environment."""
    require(SGLANG_PYTHON.exists(), ".venv-sglang (`make install-sglang`)")
    return SGLANG_PYTHON


def require_nemo_run() -> None:
    require(importlib.util.find_spec("nemo_run") is not None, "nemo-run (`make install`)")
