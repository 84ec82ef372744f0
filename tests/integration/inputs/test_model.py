"""The cases of tests/inputs/model.yaml."""

from __future__ import annotations

import pytest

from tests.support.inputs.cases import Case, parameters
from tests.support.inputs.judge import judge
from tests.support.inputs.world import Prepared


@pytest.mark.parametrize("case", parameters("model"))
def test_wrong_model(case: Case, prepared: Prepared) -> None:
    judge(case, prepared)
