"""A rank's figures are lines through two traces."""

from __future__ import annotations

from typing import Any

import pytest

from pacs_megatron.contracts.layout import Layout
from pacs_megatron.workbench.trace.estimate import extrapolate, kinds_of_stages, layers_to_trace
from pacs_megatron.workbench.trace.rank import TraceRequest


def moment(part: str, num_bytes: int, **by_part: int) -> dict[str, Any]:
    return {
        "phase": "forward and backward",
        "part": part,
        "operation": "aten.mm.default",
        "num_bytes": num_bytes,
        "by_part": by_part,
    }


def trace_of(layers: int) -> dict[str, Any]:
    """State 100 a layer; a head with 1000 beside the state; backward 40 a layer beside it."""
    state = 100 * layers
    call = {
        "phase": "forward and backward",
        "operation": "allreduce_",
        "ranks": [0, 1],
        "backend": "nccl",
        "num_bytes": 7,
    }
    score_call = {**call, "phase": "log-probs: step_start"}
    return {
        "num_microbatches": 3,
        "groups": {"tp": [0, 1], "dp": [0, 1]},
        "live_after": {"update": state + 5},
        "flops": {"forward and backward": 60 * layers + 20, "log-probs: step_start": 9},
        "moments": [
            moment("output_layer", state + 1000, state=state, output_layer=1000),
            moment("decoder.layers", state + 40 * layers, state=state, layers=40 * layers),
        ],
        "work": [
            ["forward and backward", "aten.mm.default", 50, 6, 4 * layers],
            # A kernel over all layers has another size with each number of them.
            ["optimizer", "te.multi_tensor_adam", 0, 100 * layers, 2],
        ],
        "collectives": [call] * (2 * layers) + [score_call],
        "host_syncs": [
            {"phase": "optimizer", "operation": "item", "place": "a.py:1", "count": 2},
        ],
    }


def estimate(num_layers: int) -> Any:
    request = TraceRequest(config="x.yaml", rank=0, updates=2)
    traces = (trace_of(2), trace_of(4))
    return extrapolate(0, num_layers, request, traces, Layout(world_size=2, tp=2))


def test_the_peak_moves_from_the_head_to_the_layers() -> None:
    """With 2 and 4 layers the head has it, with 100 layers the backward pass."""
    few = estimate(10).peak
    assert (few.num_bytes, few.part) == (2000, "output_layer")
    many = estimate(100).peak
    assert (many.num_bytes, many.part) == (14_000, "decoder.layers")
    assert many.by_part == {"state": 10_000, "layers": 4000}


def test_an_update_of_a_trace_of_two() -> None:
    """Phases of updates ran twice in the trace, a score pass once."""
    result = estimate(10)
    assert result.live_after == {"update": 1005}
    assert result.flops == {"forward and backward": 310, "log-probs: step_start": 9}
    by_phase = {each.phase: each for each in result.traffic}
    update = by_phase["forward and backward"]
    assert (update.group, update.calls, update.num_bytes) == ("tp (2 ranks)", 10, 70)
    assert (update.ranks, update.backend) == ((0, 1), "nccl")
    assert by_phase["log-probs: step_start"].calls == 1
    assert result.syncs == {("optimizer", "item", "a.py:1"): 1}
    assert result.work["forward and backward", "aten.mm.default", 50, 6] == 20
    adam = [key[3] * count for key, count in result.work.items() if key[0] == "optimizer"]
    assert sum(adam) == 1000


@pytest.mark.parametrize(
    ("pp", "vpp", "layers", "stages"),
    [(1, None, (2, 4), [0]), (2, None, (2, 4), [0, 1]), (4, 3, (3, 6), [0, 2, 3])],
)
def test_what_is_traced(
    pp: int, vpp: int | None, layers: tuple[int, int], stages: list[int]
) -> None:
    layout = Layout(world_size=8, pp=pp, vpp=vpp)
    assert layers_to_trace(layout) == layers
    assert kinds_of_stages(layout) == stages
