"""Fixtures of several modules."""

from __future__ import annotations

import pytest

from tests.support.hostile import World, make_world


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A sound model, configuration and run, which every hostile case copies; read only."""
    return make_world(tmp_path_factory.mktemp("world"))
