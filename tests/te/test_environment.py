"""The one module here that is collected without Transformer Engine, so that the others are skipped
with a reason.
"""

import pytest


def test_transformer_engine_is_installed() -> None:
    pytest.importorskip(
        "transformer_engine",
        reason="tests/te needs the environment of `make test-te` (PACS_TE_PACK)",
    )
