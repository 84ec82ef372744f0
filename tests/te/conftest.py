"""Needs Transformer Engine and no GPU:

`make test-te` builds the environment (see tools/install.sh).
"""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("transformer_engine") is None:
    collect_ignore_glob = ["*/test_*.py"]
    if os.environ.get("PACS_CAMPAIGN") == "1":
        raise pytest.UsageError(
            "tests/te: transformer_engine is not installed; run it by `make test-te`"
        )
else:
    import tests.te.stand_ins  # noqa: F401
