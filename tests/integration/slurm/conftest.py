"""One real Slurm a test session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm import Slurm, slurm_missing, start_slurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two idle nodes on this host. Skips where Slurm is not installed, fails there under PACS_CI=1."""
    missing = slurm_missing()
    if missing is not None:
        if os.environ.get("PACS_CI") == "1":
            pytest.fail(f"PACS_CI=1, but a Slurm cannot be started: missing {missing}")
        pytest.skip(f"a Slurm cannot be started: missing {missing}")
    cluster = start_slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture
def repo() -> Path:
    """The checkout that jobs run from."""
    return Path(__file__).parents[3]
