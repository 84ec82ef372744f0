"""`plan` for Qwen3-8B and 14B against arithmetic written out by hand: memory items and the parts of
a step, within 3 %.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.workbench.plan import plan as planning
from pacs_megatron.workbench.plan.memory import kv_bytes_per_token
from pacs_megatron.workbench.plan.render import render

ROOT = Path(__file__).parents[4]
H100_BYTES = 79.1 * 2**30


def plan_of(name: str, *overrides: str) -> planning.Plan:
    return planning.make_plan(load_config(ROOT / "configs" / "runs" / name, list(overrides)))


def items(plan: planning.Plan) -> dict[str, float]:
    return {item.name: item.num_bytes for item in plan.stages[0].items}


def found(named: dict[str, float], start: str) -> float:
    (value,) = [value for name, value in named.items() if name.startswith(start)]
    return value


def test_8b_with_tp2_on_eight_gpus() -> None:
    """36 layers, hidden 4096, 32 query and 8 KV heads of 128, MLP 12288, vocabulary 151936
    (untied); dp = 4.
    """
    named = items(plan_of("pacs-qwen3-8b-1n8g-tp2.yaml", "policy.offload=none"))
    qkv = 4096 * 6144 / 2
    projection = 4096 * 4096 / 2
    mlp = 3 * 4096 * 12288 / 2
    norms = 2 * 4096 + 2 * 128
    rank = 36 * (qkv + projection + mlp + norms) + 2 * 151936 * 4096 / 2 + 4096
    assert rank == 4_095_521_792
    assert found(named, "weights") == pytest.approx(2 * rank, rel=0.03)
    assert found(named, "gradients") == pytest.approx(4 * rank, rel=0.03)
    assert found(named, "Adam moments") == pytest.approx(8 * rank / 4, rel=0.03)
    assert found(named, "master weights") == pytest.approx(4 * rank / 4, rel=0.03)
    # Saved a token and layer: four times the hidden state over tp; queries and keys before their
    # norm, queries, attention output, keys and values after it; both halves of the MLP and their
    # product; the softmax's sum, fp32.
    layer = 2 * (4 * 4096 / 2 + (5120 + 2 * 4096 + 2 * 1024) / 2 + 3 * 12288 / 2) + 4 * 32 / 2
    assert found(named, "activations") == pytest.approx(36 * 9216 * layer, rel=0.03)
    # A chunk: 1/512 of the memory in elements, of 75,968 columns: fp32 logits and exponentials,
    # bf16 logits and gradient.
    rows = H100_BYTES / 512 / 75968
    head = rows * 75968 * (4 + 4 + 2 + 2) + 75968 * 4096 * (4 + 2) + 2 * 2 * 4096 * 9216
    assert found(named, "output layer") == pytest.approx(head, rel=0.03)


def test_14b_with_tp4_on_one_node_of_eight() -> None:
    """40 layers, hidden 5120, 40 query and 8 KV heads of 128, MLP 17408, vocabulary 151936
    (untied); dp = 2.
    """
    plan = plan_of("pacs-qwen3-14b-2n8g-tp4.yaml")
    named = items(plan)
    qkv = 5120 * 7168 / 4
    projection = 5120 * 5120 / 4
    mlp = 3 * 5120 * 17408 / 4
    norms = 2 * 5120 + 2 * 128
    rank = 40 * (qkv + projection + mlp + norms) + 2 * 151936 * 5120 / 4 + 5120
    assert found(named, "weights") == pytest.approx(2 * rank, rel=0.03)
    assert found(named, "gradients") == pytest.approx(4 * rank, rel=0.03)
    assert found(named, "Adam moments") == pytest.approx(8 * rank / 2, rel=0.03)
    layer = 2 * (4 * 5120 / 4 + (6144 + 2 * 5120 + 2 * 1024) / 4 + 3 * 17408 / 4) + 4 * 40 / 4
    assert found(named, "activations") == pytest.approx(40 * 9216 * layer, rel=0.03)
    rows = H100_BYTES / 512 / 37984
    head = rows * 37984 * 12 + 37984 * 5120 * 6 + 2 * 2 * 5120 * 9216
    assert found(named, "output layer") == pytest.approx(head, rel=0.03)


def test_recomputation_by_hand() -> None:
    """Qwen3-8B: full recomputation keeps one input a layer; `mlp` drops three of its tensors and
    keeps one layer's copy.
    """
    none, full, mlp = (
        items(plan_of("pacs-qwen3-8b-1n8g-tp2.yaml", *overrides))
        for overrides in (
            [],
            ["parallel.recompute.granularity=full"],
            ["parallel.recompute.granularity=selective", "parallel.recompute.modules=[mlp]"],
        )
    )
    assert found(full, "layer inputs kept") == pytest.approx(36 * 9216 * 2 * 4096 / 2, rel=0.03)
    assert found(full, "layers being recomputed") == pytest.approx(
        found(none, "activations") / 36, rel=0.03
    )
    part = 9216 * 2 * 3 * 12288 / 2
    assert found(none, "activations") - found(mlp, "activations") == pytest.approx(
        36 * part, rel=0.03
    )
    assert found(mlp, "parts being recomputed") == pytest.approx(part, rel=0.03)


@pytest.mark.parametrize(("tp", "heads_per_gpu"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_a_server_never_splits_a_kv_head(tp: int, heads_per_gpu: int) -> None:
    """48 layers with 4 KV heads of 128: keys and values in bf16."""
    spec = plan_of("pacs-qwen3-30b-a3b-4n8g-ep8.yaml").spec

    assert kv_bytes_per_token(spec, tp) == 2 * 48 * heads_per_gpu * 128 * 2


@pytest.mark.parametrize("granularity", ["none", "full"])
def test_seconds_of_an_update_by_hand(granularity: str) -> None:
    """14B: three forward passes' FLOPs, a fourth of the layers with recomputation, at 40 % of 8
    H100 less the tp loss.
    """
    plan = plan_of("pacs-qwen3-14b-2n8g-tp4.yaml", f"parallel.recompute.granularity={granularity}")
    prompt = plan.lengths.prompt
    response = plan.lengths.response
    total = prompt + response
    layer = 5120 * (5120 + 2 * 1024) + 5120 * 5120 + 3 * 5120 * 17408
    layers = 2 * 40 * layer + 2 * total * 5120 * 40
    head = 2 * 5120 * 151936 * response / total
    tokens = 8192 * total
    work = 3 * (layers + head) + (layers if granularity == "full" else 0)
    seconds = tokens * work / (8 * 989e12 * 0.40 * (1 - 0.04) ** 2)
    (updates,) = [phase for phase in plan.phases if phase.name == "updates"]
    assert updates.seconds == pytest.approx(seconds, rel=0.03)
    assert updates.flops == pytest.approx(tokens * 3 * (layers + head), rel=0.03)
    (sync,) = [phase for phase in plan.phases if phase.name.startswith("weight sync")]
    assert sync.seconds == pytest.approx(2 * 14_768_307_200 / (40e9 * 0.5), rel=0.03)


def test_ranges_contain_the_plan() -> None:
    plan = plan_of("pacs-qwen3-14b-2n8g-tp4-fp8.yaml")
    for memory in (*plan.stages, plan.rollout):
        assert memory is not None and memory.span[0] < memory.total < memory.span[1]
    low, high = plan.step_span
    assert low < plan.step_s < high
    assert f"{low:.1f} to {high:.1f} s" in render(plan)
