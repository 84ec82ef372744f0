"""The GPU path of the shipped hybrids at their true layout and width with Transformer Engine: three
layers with a gated delta net, and one with gated attention, whose heads of 256 the local layers'
kernel does not have on fake CUDA.
"""

from __future__ import annotations

import pytest

from pacs_megatron.workbench.trace.rank import TraceRequest
from tests.support.needs import needs_delta_nets
from tests.support.traced_rank import trace, unreviewed_waits

RUNS = (
    "configs/runs/pacs-qwen3.5-9b-1n8g-tp4.yaml",
    "configs/runs/grpo-qwen3.5-27b-4n8g-tp4.yaml",
    "configs/runs/grpo-qwen3.5-35b-a3b-4n8g-ep8.yaml",
)


@needs_delta_nets
@pytest.mark.parametrize("config", RUNS)
def test_a_shipped_hybrid_executes(config: str) -> None:
    traced = trace(TraceRequest(config=config, num_layers=4, paths=("step", "export")))

    assert not traced["unknown_shapes"]
    assert not unreviewed_waits(traced["host_syncs"])
    assert traced["flops"]["forward and backward"] > 0
