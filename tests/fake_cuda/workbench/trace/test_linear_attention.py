"""The GPU path of the shipped hybrids at their true layout and width: three layers with a gated
delta net. The gated attention is not among them: fake CUDA of torch 2.14 lacks its kernel for heads
of 256.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.workbench.trace.rank import TraceRequest
from tests.support.needs import needs_delta_nets
from tests.support.traced_rank import ROOT, trace, unreviewed_waits

RUNS = sorted(
    str(path.relative_to(ROOT)) for path in Path(ROOT / "configs/runs").glob("*qwen3.5*.yaml")
)
IN_MAKE_TEST = "configs/runs/pacs-qwen3.5-9b-1n8g-tp4.yaml"


@needs_delta_nets
@pytest.mark.parametrize(
    "config",
    [
        config if config == IN_MAKE_TEST else pytest.param(config, marks=pytest.mark.full)
        for config in RUNS
    ],
)
def test_a_shipped_hybrid_executes(config: str) -> None:
    traced = trace(
        TraceRequest(
            config=config, num_layers=3, transformer_engine=False, paths=("step", "export")
        )
    )
    assert not traced["unknown_shapes"]
    assert not unreviewed_waits(traced["host_syncs"])
    assert traced["flops"]["forward and backward"] > 0
