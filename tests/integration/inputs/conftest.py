"""The states that the cases of tests/inputs/ start from."""

from __future__ import annotations

import pytest

from tests.support.inputs.world import Prepared


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Models, runs and results, each made once."""
    return Prepared(tmp_path_factory.mktemp("inputs"))
