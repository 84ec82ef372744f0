"""Programs and environments that a test needs: a skip with the reason, or a failure in CI."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import pytest

HAS_DELTA_NETS = not importlib.metadata.version("megatron-core").startswith("0.16.")
needs_delta_nets = pytest.mark.skipif(
    not HAS_DELTA_NETS, reason="Megatron-Core 0.16 has no gated delta nets for packed samples"
)
"""They run on the row of Python 3.12 and 3.13 (`make test-other`)."""
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
