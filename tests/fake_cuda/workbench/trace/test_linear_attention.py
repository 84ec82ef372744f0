"""The GPU path of the shipped hybrids at their true layout and width: three layers with a gated
delta net. The gated attention is not among them: fake CUDA of torch 2.14 lacks its kernel for heads
of 256.
"""

from __future__ import annotations

import pytest

from pacs_megatron.workbench.trace.rank import TraceRequest
from tests.support.needs import needs_delta_nets
from tests.support.traced_rank import trace, unreviewed_waits

# Without experts: of Megatron-Core 0.19's local dispatcher the trace does not know all shapes.
RUNS = (
    "configs/runs/pacs-qwen3.5-9b-1n8g-tp4.yaml",
    "configs/runs/grpo-qwen3.5-27b-4n8g-tp4.yaml",
)
IN_MAKE_TEST = RUNS[0]


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
