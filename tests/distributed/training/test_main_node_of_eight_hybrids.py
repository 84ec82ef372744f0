"""The shipped configurations of hybrids on the modelled node of eight GPUs (see
test_main_node_of_eight.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.models import load_spec
from tests.support.needs import needs_delta_nets
from tests.support.node.runs import HYBRIDS, check_run, shipped_run

pytestmark = [needs_delta_nets, pytest.mark.full]


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_shipped_hybrid_trains_two_steps_and_saves(tmp_path: Path, name: str) -> None:
    run = shipped_run(name, tmp_path)
    check_run(run)
    spec = load_spec(run.run_dir / "hf")
    assert spec.delta is not None
    assert (spec.moe is not None) == ("-a3b-" in name)
