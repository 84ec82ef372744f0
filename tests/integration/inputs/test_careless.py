"""The cases of tests/inputs/careless.yaml."""

from __future__ import annotations

import pytest

from tests.support.inputs.cases import Case, parameters
from tests.support.inputs.judge import judge
from tests.support.inputs.world import Prepared


@pytest.mark.parametrize("case", parameters("careless"))
def test_first_tries(case: Case, prepared: Prepared) -> None:
    judge(case, prepared)
