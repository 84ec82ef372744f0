"""`plan` for Qwen3-8B and 14B against arithmetic written out by hand: memory items and the parts of
a step, within 3 %.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks import published_decode as decode
from benchmarks import published_throughput as throughput
from pacs_megatron.config import load_config
from pacs_megatron.models import read_spec
from pacs_megatron.runtime.gpus import GPUS
from pacs_megatron.workbench.plan import constants, timing
from pacs_megatron.workbench.plan import plan as planning
from pacs_megatron.workbench.plan.memory import kv_bytes_per_token
from pacs_megatron.workbench.plan.render import render

ROOT = Path(__file__).parents[4]
H100_BYTES = 79.1 * 2**30


H100 = ["resources.gpu=h100", "batch.tokens_per_microbatch=9216"]
SERVERS_APART = [
    "policy.offload=none",
    "resources.rollout_nodes=1",
    "rollout.servers.colocated=false",
    "rollout.servers.count=8",
    "rollout.sync.transport=broadcast",
]
BY_HAND = {
    "pacs-qwen3-8b-1n8g-tp2": H100,
    "pacs-qwen3-14b-2n8g-tp4": [*H100, "resources.nodes=1", *SERVERS_APART],
    "pacs-qwen3-14b-2n8g-tp4-fp8": [],
    "grpo-qwen3-30b-a3b-4n8g-ep8": [*H100, "resources.nodes=2", "rollout.servers.count=8"],
}
"""the counts below are of these, on H100"""


def plan_of(name: str, *overrides: str) -> planning.Plan:
    path = ROOT / "configs" / "runs" / f"{name}.yaml"
    return planning.make_plan(load_config(path, [*BY_HAND[name], *overrides]))


def items(plan: planning.Plan) -> dict[str, float]:
    return {item.name: item.num_bytes for item in plan.stages[0].items}


def found(named: dict[str, float], start: str) -> float:
    (value,) = [value for name, value in named.items() if name.startswith(start)]
    return value


def test_8b_with_tp2_on_eight_gpus() -> None:
    """36 layers, hidden 4096, 32 query and 8 KV heads of 128, MLP 12288, vocabulary 151936
    (untied); dp = 4.
    """
    named = items(plan_of("pacs-qwen3-8b-1n8g-tp2", "policy.offload=none"))
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
    # product; in fp32 the softmax's sum and the scales of the norms.
    layer = 2 * (4 * 4096 / 2 + (5120 + 2 * 4096 + 2 * 1024) / 2 + 3 * 12288 / 2)
    layer += 4 * (32 + 32 + 8) / 2 + 8 / 2
    assert found(named, "activations") == pytest.approx(9216 * 36 * layer, rel=1e-3)
    # A chunk: 1/512 of the memory in elements, of 75,968 columns: bf16 logits, and in fp32 shifted
    # logits and exponentials. Hidden states: of all positions, this rank's before and after the
    # final norm, and all ranks'; of the predicting ones, and their gradient.
    rows = H100_BYTES / 512 / 75968
    head = rows * 75968 * 10 + 75968 * 4096 * 4 + (1 / 2 + 1 / 2 + 1 + 1 + 1) * 2 * 4096 * 9216
    assert found(named, "output layer") == pytest.approx(head, rel=0.03)


def test_14b_with_tp4_on_one_node_of_eight() -> None:
    """40 layers, hidden 5120, 40 query and 8 KV heads of 128, MLP 17408, vocabulary 151936
    (untied); dp = 2.
    """
    plan = plan_of("pacs-qwen3-14b-2n8g-tp4")
    named = items(plan)
    qkv = 5120 * 7168 / 4
    projection = 5120 * 5120 / 4
    mlp = 3 * 5120 * 17408 / 4
    norms = 2 * 5120 + 2 * 128
    rank = 40 * (qkv + projection + mlp + norms) + 2 * 151936 * 5120 / 4 + 5120
    assert found(named, "weights") == pytest.approx(2 * rank, rel=0.03)
    assert found(named, "gradients") == pytest.approx(4 * rank, rel=0.03)
    assert found(named, "Adam moments") == pytest.approx(8 * rank / 2, rel=0.03)
    layer = 2 * (4 * 5120 / 4 + (6144 + 2 * 5120 + 2 * 1024) / 4 + 3 * 17408 / 4)
    layer += 4 * (40 + 40 + 8) / 4 + 8 / 4
    assert found(named, "activations") == pytest.approx(9216 * 40 * layer, rel=1e-3)
    rows = H100_BYTES / 512 / 37984
    head = rows * 37984 * 10 + 37984 * 5120 * 4 + (1 / 4 + 1 / 4 + 1 + 1 + 1) * 2 * 5120 * 9216
    assert found(named, "output layer") == pytest.approx(head, rel=0.03)


def test_recomputation_by_hand() -> None:
    """Qwen3-8B: full recomputation keeps one input a layer. `mlp` drops three
    of a layer's tensors and the output of the norm before it. `core_attn` keeps the product of
    queries, keys and values instead of the values alone. `layernorm` drops nothing, because
    Transformer Engine fuses both norms with what follows.
    """
    none = found(items(plan_of("pacs-qwen3-8b-1n8g-tp2")), "activations")

    full = items(plan_of("pacs-qwen3-8b-1n8g-tp2", "parallel.recompute.granularity=full"))
    assert found(full, "layer inputs kept") == pytest.approx(36 * 9216 * 2 * 4096 / 2)

    changes = {
        "mlp": -2 * (3 * 12288 / 2 + 4096 / 2),
        "core_attn": 2 * (4096 + 1024) / 2 - 4 * 32 / 2,
        "layernorm": 0.0,
    }
    for module, change in changes.items():
        overrides = (
            "parallel.recompute.granularity=selective",
            f"parallel.recompute.modules=[{module}]",
        )
        some = items(plan_of("pacs-qwen3-8b-1n8g-tp2", *overrides))
        assert found(some, "activations") - none == pytest.approx(36 * 9216 * change)


def test_recomputed_experts_by_hand() -> None:
    """Qwen3-30B-A3B with ep 8: hidden 2048, 32 query and 4 KV heads of 128, 8 of 128 experts of
    width 768.
    """
    overrides = ["parallel.recompute.granularity=full", "batch.tokens_per_microbatch=40960"]
    named = items(plan_of("grpo-qwen3-30b-a3b-4n8g-ep8", *overrides))
    assert found(named, "layer inputs kept") == 48 * 40960 * 2 * 2048

    # The fullest rank has 1.3 times the mean of the tokens. Of the layer, with its output: four
    # hidden states; queries three times, keys twice, values; the experts' inputs, both halves and
    # product; scales; the router.
    tokens = 8 * 1.3
    layer = 2 * (4 * 2048 + 3 * 4096 + 2 * 512 + 512 + tokens * (2048 + 3 * 768))
    layer += 4 * (32 + 32 + 4) + 8 + 128 * 9 + 8 * 24
    assert found(named, "layers being recomputed") == pytest.approx(40960 * layer)

    # The permuted tokens; those received, processed, and sorted back.
    working = 2 * 2048 * (8 + 3 * tokens)
    assert found(named, "working tensors") == pytest.approx(40960 * working)


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_what_a_trainer_in_fp8_keeps_beside_servers(offload: str) -> None:
    """8B at tp 2, dp 4, 4.1 billion parameters of a rank: weights in two bytes, and FP8 copies of
    two bytes, which off-loading frees as it frees the gradients of four; Adam's state has 12 bytes,
    divided by dp.
    """
    name = "pacs-qwen3-8b-1n8g-tp2-fp8"
    plan = planning.make_plan(
        load_config(ROOT / "configs" / "runs" / f"{name}.yaml", [f"policy.offload={offload}"])
    )
    assert plan.rollout is not None
    kept = {
        item.name: item.num_bytes
        for item in plan.rollout.items
        if item.name.startswith("trainer's")
    }
    bytes_of_parameter = {"none": 2 + 2 + 4 + 12 / 4, "optimizer": 2.0, "all": 0.0}[offload]
    expected = bytes_of_parameter * 4_095_521_792
    assert sum(kept.values()) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_widths_follow_the_dtypes(dtype: str) -> None:
    """Of 14B in fp32: gathered weights and the exported model; of fp32 servers: their cache."""
    width = {"bf16": 2, "fp32": 4}[dtype]
    plan = plan_of(
        "pacs-qwen3-14b-2n8g-tp4",
        f"precision.dtype={dtype}",
        f"rollout.dtype={dtype}",
        "rollout.sync.bucket_mib=1024",
    )
    largest = 151936 * 5120
    assert found(items(plan), "weight sync: two buckets") == 2 * 2**30 + width * largest

    parameters = 14_768_307_200
    checkpoints = plan.num_checkpoints * plan.checkpoint_bytes
    assert plan.disk_bytes == pytest.approx(1.2 * (checkpoints + width * parameters))


@pytest.mark.parametrize(("tp", "heads_per_gpu"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_a_server_never_splits_a_kv_head(tp: int, heads_per_gpu: int) -> None:
    """48 layers with 4 KV heads of 128: keys and values in bf16."""
    spec = plan_of("grpo-qwen3-30b-a3b-4n8g-ep8").spec

    assert kv_bytes_per_token(spec, tp, 2) == 2 * 48 * heads_per_gpu * 128 * 2


@pytest.mark.parametrize("granularity", ["none", "full"])
def test_seconds_of_an_update_by_hand(granularity: str) -> None:
    """14B: three forward passes' FLOPs, a fourth of the layers with recomputation, at 45 % of 8
    H100 less the tp loss.
    """
    plan = plan_of("pacs-qwen3-14b-2n8g-tp4", f"parallel.recompute.granularity={granularity}")
    prompt = plan.lengths.prompt
    response = plan.lengths.response
    total = prompt + response
    layer = 5120 * (5120 + 2 * 1024) + 5120 * 5120 + 3 * 5120 * 17408
    layers = 2 * 40 * layer + 2 * total * 5120 * 40
    head = 2 * 5120 * 151936 * response / total
    tokens = 8192 * total
    work = 3 * (layers + head) + (layers if granularity == "full" else 0)
    seconds = tokens * work / (8 * 989e12 * 0.45 * (1 - 0.04) ** 2)
    (updates,) = [phase for phase in plan.phases if phase.name == "updates"]
    assert updates.seconds == pytest.approx(seconds, rel=0.03)
    assert updates.flops == pytest.approx(tokens * 3 * (layers + head), rel=0.03)
    (sync,) = [phase for phase in plan.phases if phase.name.startswith("weight sync")]
    # Three quarters of the weights over NVLink, seven times their bytes in memory, one copy over
    # half of a network link, and 56 requests.
    weights = 2 * 14_768_307_200
    gathered = weights * 3 / 4 / (0.75 * 450e9)
    copied = 7 * weights / (0.6 * 3350e9)
    sent = weights / (40e9 * 0.5) + 56 * 0.005
    # A bucket is filled while the one before is sent; the first one is filled alone.
    assert sync.seconds == pytest.approx(sent + (gathered + copied) / 56, rel=0.01)

    disk = plan_of("pacs-qwen3-14b-2n8g-tp4", "rollout.sync.transport=disk")
    (sync,) = [phase for phase in disk.phases if phase.name.startswith("weight sync")]
    written_and_read = 2 * weights / (constants.DISK_GB_S.value * 1e9)
    expected = gathered + copied + written_and_read + 56 * 0.005
    assert sync.seconds == pytest.approx(expected, rel=0.01)


def test_seconds_of_experts_by_hand() -> None:
    """30B-A3B with full recomputation: beside the products, 8 copies of each token in 48 layers
    take the time of 255 kB over NVLink each, and a third more for the recomputed forward pass.
    """
    none, full = (
        plan_of("grpo-qwen3-30b-a3b-4n8g-ep8", f"parallel.recompute.granularity={kind}")
        for kind in ("none", "full")
    )
    for plan, share in ((none, 1.0), (full, 4 / 3)):
        (updates,) = [phase for phase in plan.phases if phase.name == "updates"]
        lengths = plan.lengths
        tokens = timing.samples_per_step(plan.config) * lengths.total
        products = updates.flops * (1 if share == 1 else 4 / 3)
        seconds = products / (16 * 989e12 * 0.45)
        seconds += share * tokens * 8 * 48 * 255e3 / (16 * 450e9)
        assert updates.seconds == pytest.approx(seconds, rel=0.03)
        assert updates.span[0] < 0.8
        assert updates.span[1] > 1.2


def test_published_throughputs_outside_the_fit() -> None:
    """At most 15 % in the median, and each within the plan's range."""
    errors = []
    for row in throughput.ROWS:
        if row.is_fitted:
            continue
        spec = read_spec(throughput.CONFIGS[row.model])
        seconds, span = throughput.planned_seconds(row, spec)
        actual = throughput.published_seconds(row, spec)
        errors.append(abs(seconds / actual - 1))
        assert span[0] * seconds <= actual <= span[1] * seconds
    assert statistics.median(errors) <= 0.15


def test_published_decoding_steps_outside_the_fit() -> None:
    """At most 15 % in the median, each within the plan's range; the constants are those of the
    fit.
    """
    errors = []
    low, high = constants.DECODE_TIME.span
    for row in decode.ROWS:
        if row.is_fitted:
            continue
        ratio = row.published_ms / decode.planned_ms(row)
        errors.append(abs(1 / ratio - 1))
        assert low <= ratio <= high
    assert statistics.median(errors) <= 0.15

    overhead_s, sequence_s, memory, compute = decode.fitted()
    assert constants.DECODE_OVERHEAD_S.value == pytest.approx(overhead_s, rel=0.03)
    assert constants.DECODE_SEQUENCE_S.value == pytest.approx(sequence_s, rel=0.03)
    assert constants.DECODE_BANDWIDTH_FRAC.value == pytest.approx(1 / memory, rel=0.03)
    assert constants.DECODE_MFU.value == pytest.approx(1 / compute, rel=0.03)


def test_a_decoding_step_by_hand() -> None:
    """14B on one H200, 100 sequences after 2,000 tokens: 29.5 GB of weights and 40 layers with 8
    KV heads of 128, both in bf16.
    """
    spec = plan_of("pacs-qwen3-14b-2n8g-tp4-fp8").spec
    read_bytes = 2 * 14_768_307_200 + 100 * 2000 * 40 * 2 * 8 * 128 * 2
    seconds = timing.decode_step_s(spec, GPUS["h200"], 1, read_bytes, 100, 2000)

    # Products of the matrices that a token passes, without the embedding, and attention's two.
    matrices = 14_768_307_200 - 151936 * 5120
    flops = 100 * (2 * matrices + 2 * 2 * 2000 * 40 * 40 * 128)
    by_hand = read_bytes / (0.99 * 4800e9) + flops / (0.74 * 989e12) + 100 * 49e-6 + 0.0028
    assert seconds == pytest.approx(by_hand, rel=0.01)


def test_ranges_contain_the_plan() -> None:
    plan = plan_of("pacs-qwen3-14b-2n8g-tp4-fp8")
    for memory in (*plan.stages, plan.rollout):
        assert memory is not None and memory.span[0] < memory.total < memory.span[1]
    low, high = plan.step_span
    assert low < plan.step_s < high
    assert f"{low:.1f} to {high:.1f} s" in render(plan)
