"""Fake servers of several test files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.servers.client import VERSION
from tests.support.servers.fake_sglang import FakeSglang


@pytest.fixture
def fake() -> Iterator[FakeSglang]:
    with FakeSglang() as made:
        made.weight_version = VERSION
        yield made


@pytest.fixture
def other() -> Iterator[FakeSglang]:
    with FakeSglang() as made:
        made.weight_version = VERSION
        yield made
