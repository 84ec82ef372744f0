"""The cases of tests/inputs/cluster.yaml."""

from __future__ import annotations

import pytest

from tests.support.inputs.cases import Case, parameters
from tests.support.inputs.judge import judge
from tests.support.inputs.world import Prepared


@pytest.mark.parametrize("case", parameters("cluster"))
def test_wrong_cluster(case: Case, prepared: Prepared) -> None:
    judge(case, prepared)
