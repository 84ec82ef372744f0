"""Which cases of a matrix run in `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_test(cases: Iterable[str], *kept: str) -> list[Any]:
    """Parameters for every case: those of `kept` run in `make test`, the others in `make test-full`."""
    names = list(cases)
    assert set(kept) <= set(names), sorted(set(kept) - set(names))
    return [pytest.param(name, marks=[] if name in kept else pytest.mark.full) for name in names]


def in_tiers(cases: Iterable[str], *kept: str, every: int = 3) -> list[Any]:
    """As `in_test`, of the others every third case in `make test-full` and the rest in `make campaign`."""
    params = in_test(cases, *kept)
    others = [param for param in params if param.marks]
    in_full = {param.values[0] for param in others[::every]}
    return [
        param
        if not param.marks or param.values[0] in in_full
        else pytest.param(*param.values, marks=pytest.mark.campaign)
        for param in params
    ]
