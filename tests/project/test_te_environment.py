"""Names the reason where the tests of tests/te do not run."""

import pytest


def test_transformer_engine_is_installed() -> None:
    pytest.importorskip(
        "transformer_engine",
        reason="tests/te needs an environment of `make test-te`",
    )
