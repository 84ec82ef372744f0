"""`plan --trace` as a whole, and that a rank's figures grow linearly with its layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.contracts.layout import Layout
from pacs_megatron.errors import ExitCode
from pacs_megatron.workbench.plan.command import run_plan
from pacs_megatron.workbench.plan.plan import make_plan
from pacs_megatron.workbench.trace import runs
from pacs_megatron.workbench.trace.estimate import extrapolate
from pacs_megatron.workbench.trace.rank import TraceRequest
from tests.support.traced_rank import ROOT, trace

DENSE = "configs/runs/pacs-qwen3-14b-2n8g-tp4.yaml"
CRITIC = "configs/paper/ppo-qwen3-4b.yaml"
GIB = 2**30


def test_plan_with_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "cache_folder", lambda: tmp_path)
    # Local layers keep more than Transformer Engine's, so the run does not fit here.
    text, code = run_plan(ROOT / DENSE, [], trace=True, local_layers=True)
    assert code is ExitCode.MISCONFIGURED
    assert "traced: 2 and 4 local layers of Megatron-Core" in text
    assert "decoder.layers.mlp.linear_fc1  [traced]" in text
    assert "reduce_scatter_base, tp (4 ranks)" in text
    assert "pacs_megatron/policy/engine.py" in text
    number = r"\d+\.\d\d"
    assert re.search(
        rf"{number} s \({number} to {number}\) by kernels \(.*\); {number} s by the formulas", text
    )

    # The state of 40 layers is that of the formulas, which are exact there.
    plan = make_plan(load_config(ROOT / DENSE))
    exact = sum(item.num_bytes for item in plan.stages[0].items if item.source == "exact")
    assert f"{exact / GIB:5.1f} GiB  weights, gradients and optimizer  [traced]" in text

    # A second time the children are not started.
    monkeypatch.setattr(runs, "_run", lambda _request: pytest.fail("not kept"))
    assert run_plan(ROOT / DENSE, [], trace=True, local_layers=True) == (text, code)


@pytest.mark.full
def test_plan_with_a_trace_of_a_critic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "cache_folder", lambda: tmp_path)
    text, _ = run_plan(ROOT / CRITIC, [], trace=True, local_layers=True)

    # Both models' states, which the formulas have exactly.
    plan = make_plan(load_config(ROOT / CRITIC))
    exact = sum(item.num_bytes for item in plan.stages[0].items if item.source == "exact")
    assert f"{exact / GIB:5.1f} GiB  weights, gradients and optimizer  [traced]" in text
    for phase in ("update", "critic: values", "critic: update", "critic: forward and backward"):
        assert f"GiB  {phase}" in text


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "rank", "pp"),
    [([], 0, 1), (["parallel.recompute.granularity=full"], 0, 1), (["parallel.pp=2"], 8, 2)],
)
def test_a_rank_grows_linearly(overrides: list[str], rank: int, pp: int) -> None:
    """The peaks of 2 and 4 layers give that of 8.

    torch's Adam, which local layers use, has temporary tensors of one parameter at a time. With two
    layers on rank 8 the optimizer's shard ends inside the output layer; with more it has the whole
    of it. So these tensors stop growing, and the line through 2 and 4 layers is too high.
    """
    layout = Layout(world_size=16, tp=4, pp=pp)

    def traced(layers: int) -> tuple[TraceRequest, dict[str, Any]]:
        request = TraceRequest(
            config=DENSE,
            overrides=overrides,
            rank=rank,
            num_layers=layers * pp,
            transformer_engine=False,
        )
        return request, trace(request)

    request, few = traced(2)
    many = traced(4)[1]
    direct = traced(8)[1]
    estimate = extrapolate(pp - 1, 8, request, (few, many), layout)

    for peak in estimate.peaks:
        measured = direct["peaks"][peak.phase]["num_bytes"]
        if peak.phase == "optimizer":
            assert (1 - 1e-3) * measured < peak.num_bytes < 1.02 * measured
            state = sum(
                label["num_bytes"]
                for label in direct["peaks"][peak.phase]["by_label"]
                if label["phase"] == "build"
            )
            assert peak.by_part["state"] == pytest.approx(state, rel=1e-3)
        else:
            assert peak.num_bytes == pytest.approx(measured, rel=1e-3), peak.phase
    for phase, flops in estimate.flops.items():
        updates = 2 if phase in ("forward and backward", "optimizer", "update") else 1
        assert flops * updates == pytest.approx(direct["flops"][phase], rel=1e-6)
    calls = sum(each.calls for each in estimate.traffic if each.phase == "forward and backward")
    direct_calls = [
        call for call in direct["collectives"] if call["phase"] == "forward and backward"
    ]
    assert 2 * calls == len(direct_calls)
