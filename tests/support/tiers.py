"""Which cases of a matrix run in which tier of the tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_test(cases: Iterable[str], *kept: str) -> list[Any]:
    """Parameters for every case: those of `kept` run in `make test`, the others in `make
    test-full`.
    """
    names = list(cases)
    assert set(kept) <= set(names), sorted(set(kept) - set(names))
    return [pytest.param(name, marks=[] if name in kept else pytest.mark.full) for name in names]


def in_tiers(cases: Iterable[str], *kept: str, every: int = 3) -> list[Any]:
    """As `in_test`, of the others every third case (`every`) in `make test-full` and the rest in
    `make campaign`.
    """
    names = list(cases)
    others = [name for name in names if name not in kept]
    rest = set(others) - set(others[::every])
    return [
        pytest.param(name, marks=pytest.mark.campaign) if name in rest else param
        for name, param in zip(names, in_test(names, *kept), strict=True)
    ]
