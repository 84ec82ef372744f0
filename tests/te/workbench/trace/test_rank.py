"""The GPU path of shipped configurations with Transformer Engine's layers, at true layout and
width, with two layers a stage.
"""

from __future__ import annotations

from typing import Any

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.layout import ranks_to_start
from pacs_megatron.workbench.trace.rank import TraceRequest
from tests.support.traced_rank import ROOT, trace, unreviewed_waits

FP8 = "configs/runs/pacs-qwen3-14b-2n8g-tp4-fp8.yaml"
EXPERTS = "configs/runs/pacs-qwen3-30b-a3b-4n8g-ep8.yaml"
WIDE = "configs/runs/pacs-qwen3-32b-4n8g-tp8.yaml"
CRITIC = "configs/paper/ppo-qwen3-8b.yaml"
PIPELINE = "configs/runs/pacs-qwen2.5-72b-8n8g-tp8-pp4.yaml"
LOCAL_LAYERS_ONLY = ("rope_utils.py", "PackedAttention")


def _other_ranks_in_fp8() -> list[Any]:
    """The first, a middle and the last rank of the shipped runs in FP8, but rank 0 of `FP8`."""
    cases = []
    for path in sorted((ROOT / "configs" / "runs").glob("*-fp8.yaml")):
        config = str(path.relative_to(ROOT))
        world_size = ranks_to_start(load_config(path, []).config)
        for rank in (0, world_size // 2 - 1, world_size - 1):
            if (config, rank) != (FP8, 0):
                cases.append(pytest.param(config, rank, 2, marks=pytest.mark.campaign))
    return cases


@pytest.mark.parametrize(
    ("config", "rank", "num_layers"),
    [
        (FP8, 0, 2),
        (EXPERTS, 0, 2),
        (WIDE, 0, 2),
        (CRITIC, 0, 2),
        (PIPELINE, 0, 8),
        pytest.param(PIPELINE, 31, 8, marks=pytest.mark.campaign),
        (PIPELINE, 63, 8),
        *_other_ranks_in_fp8(),
    ],
)
def test_a_shipped_run_executes(config: str, rank: int, num_layers: int) -> None:
    request = TraceRequest(config=config, rank=rank, num_layers=num_layers)
    traced = trace(request)

    assert not traced["unknown_shapes"]
    assert not unreviewed_waits(traced["host_syncs"])
    places = " ".join(sync["function"] for sync in traced["host_syncs"])
    for name in LOCAL_LAYERS_ONLY:
        assert name not in places
    labels = traced["peaks"]["forward and backward"]["by_label"]
    assert any(label["operation"].startswith("te.") for label in labels)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_fp8_with_one_scale_executes(recipe: str) -> None:
    """A tensor has one byte an element, in both directions that products need."""
    overrides = [f"precision.fp8={{recipe: {recipe}, format: hybrid}}"]
    traced = trace(TraceRequest(config=FP8, overrides=overrides, num_layers=2))
    blocks = trace(TraceRequest(config=FP8, num_layers=2))

    assert not traced["unknown_shapes"]
    assert not unreviewed_waits(traced["host_syncs"])
    peaks = [each["peaks"]["forward and backward"]["num_bytes"] for each in (traced, blocks)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)


def test_fp8_keeps_the_inputs_of_products_in_one_byte() -> None:
    """Of 14B at tp 4 a layer keeps for the backward pass, in bf16, the inputs of its four products:
    the hidden states twice, the heads' outputs and the MLP's intermediate values.
    """
    in_fp8 = trace(TraceRequest(config=FP8, num_layers=2))
    in_bf16 = trace(TraceRequest(config=FP8.replace("-fp8", ""), num_layers=2))

    def quantized(traced: dict[str, Any]) -> int:
        labels = traced["peaks"]["forward and backward"]["by_label"]
        sizes = [each["num_bytes"] for each in labels if each["operation"] == "te.quantize"]
        return sum(sizes)

    assert quantized(in_bf16) == 0
    assert quantized(in_fp8) > 0
