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
