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
PATHS = ("step", "reference", "offload", "export", "checkpoint")
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


def _every_run() -> list[Any]:
    """Every shipped run on GPUs but the hybrids, which need Megatron-Core 0.19."""
    cases = []
    for path in sorted((ROOT / "configs" / "runs").glob("*.yaml")):
        config = load_config(path, []).config
        if not config.resources.gpus_per_node or "qwen3.5" in path.name:
            continue
        name = str(path.relative_to(ROOT))
        num_layers = 2 * (config.parallel.pp or 1)
        marks = [] if name == FP8 else [pytest.mark.campaign]
        cases.append(pytest.param(name, num_layers, marks=marks, id=path.stem))
    return cases


@pytest.mark.parametrize(("config", "num_layers"), _every_run())
def test_every_path_of_a_shipped_run_executes(config: str, num_layers: int) -> None:
    """Score passes, updates, the reference, off-loading, the export and a checkpoint."""
    traced = trace(TraceRequest(config=config, num_layers=num_layers, paths=PATHS))

    assert not traced["unknown_shapes"]
    assert not unreviewed_waits(traced["host_syncs"])
    live = traced["live_after"]
    assert live["off-load to the host"] < 0.1 * live["update"]
    freed = live["log-probs: reference"] - live["off-load to the device"]
    if config == FP8:
        # Two copies in one byte of each matrix of two layers at tp 4: hidden 5120, 7168 rows of
        # queries, keys and values, MLP 17408; beside them a scale in fp32 for 128 x 128 elements.
        elements = 2 * (5120 * 7168 + 5120 * 5120 + 3 * 5120 * 17408) / 4
        assert freed == pytest.approx(2 * elements, rel=0.01)
    elif not config.endswith("-fp8.yaml"):
        assert abs(freed) < max(2**20, 2e-4 * live["log-probs: reference"])


def test_context_parallel_ranks_divide_attention() -> None:
    """Causal attention over two ranks: each has half of the pairs of queries and keys, although
    the two hold other chunks of the samples.
    """
    dense = "configs/runs/grpo-qwen3-4b-1n8g-tp1.yaml"

    def attention_flops(rank: int, *overrides: str) -> dict[str, float]:
        request = TraceRequest(
            config=dense,
            overrides=[*overrides],
            rank=rank,
            num_layers=2,
            num_groups=8,
            group_size=2,
            updates=1,
        )
        traced = trace(request)
        assert not traced["unknown_shapes"]
        assert not unreviewed_waits(traced["host_syncs"])
        found: dict[str, float] = {}
        for _, operation, flops, _, count in traced["work"]:
            if "attn" in operation:
                found[operation] = found.get(operation, 0.0) + flops * count
        return found

    whole = attention_flops(0)
    assert set(whole) == {"te.fused_attn_fwd", "te.fused_attn_bwd"}
    for rank in (0, 1):
        part = attention_flops(rank, "parallel.cp=2")
        # Half as many replicas have the same samples. Chunks pad 4,607 positions to 4,608.
        assert part == pytest.approx(whole, rel=1e-3)


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
