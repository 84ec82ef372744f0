"""The cases of tests/inputs/server.yaml."""

from __future__ import annotations

import pytest

from tests.support.inputs.cases import Case, parameters
from tests.support.inputs.judge import judge
from tests.support.inputs.world import Prepared


@pytest.mark.parametrize("case", parameters("server"))
def test_wrong_server(case: Case, prepared: Prepared) -> None:
    judge(case, prepared)
