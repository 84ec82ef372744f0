"""The GPU path of the shipped configurations at their true layout and width, with two layers."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import yaml

from pacs_megatron.config import load_config
from pacs_megatron.config.layout import ranks_to_start
from pacs_megatron.workbench.plan.known_models import need_config
from pacs_megatron.workbench.trace.rank import TraceRequest
from tests.support.tiers import in_test, in_tiers
from tests.support.traced_rank import HOST_SYNCS, ROOT, Change, trace, unreviewed_waits

RUNS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "configs" / "runs").glob("*.yaml")
    # Hybrids need kernels of flash-linear-attention.
    if not any(word in path.name for word in ("quickstart", "fp8", "qwen3.5"))
)
RUNS.append("configs/paper/ppo-qwen3-8b.yaml")
PATHS = ("step", "reference", "offload", "export", "checkpoint")
DENSE = "configs/runs/pacs-qwen3-14b-2n8g-tp4.yaml"
PIPELINE = "configs/runs/pacs-qwen2.5-72b-8n8g-tp8-pp4.yaml"
EXPERTS = "configs/runs/pacs-qwen3-30b-a3b-4n8g-ep8.yaml"
IN_MAKE_TEST = DENSE
GIB = 2**30


def request_of(config: str, **options: Any) -> TraceRequest:
    num_layers = 8 if config == PIPELINE else 2  # two a stage
    return TraceRequest(config=config, num_layers=num_layers, transformer_engine=False, **options)


def gathered_bytes(config: str) -> int:
    """Hidden states of the largest micro-batch in bf16, of a run with sequence parallelism."""
    loaded = load_config(ROOT / config, []).config
    if not loaded.parallel.sequence_parallel:
        return 0
    hidden_size: int = need_config(loaded.model.path, "model.path")["hidden_size"]
    return 2 * loaded.batch.tokens_per_microbatch * hidden_size


@functools.cache
def traced_run(config: str) -> dict[str, Any]:
    return trace(request_of(config, paths=PATHS))


@pytest.mark.parametrize(
    "config",
    [
        config if config == IN_MAKE_TEST else pytest.param(config, marks=pytest.mark.full)
        for config in RUNS
    ],
)
def test_a_shipped_run_executes(config: str) -> None:
    traced = traced_run(config)

    assert not traced["unknown_shapes"]
    assert not unreviewed_waits(traced["host_syncs"])
    # Off-loaded, the fake GPU keeps less than a tenth of the state, beside the buffer of local
    # layers for the gathered hidden states of a micro-batch.
    live = traced["live_after"]
    assert live["off-load to the host"] < 0.1 * live["update"] + gathered_bytes(config)
    # The log-probs of the pass, 4 bytes a response token, are freed meanwhile. The digest of the
    # export keeps its multipliers, less than 1 MiB.
    back = live["off-load to the device"]
    assert back == pytest.approx(live["log-probs: reference"], rel=2e-4, abs=2**20)
    # Only the head and the layers multiply matrices.
    assert traced["flops"]["forward and backward"] > 0
    assert traced["flops"]["optimizer"] == 0


def test_state_of_two_layers_by_hand() -> None:
    """14B at tp 4, dp 4: bf16 weights, fp32 gradients, and 12 bytes of Adam's state over dp.

    Hidden 5120, 40 query and 8 KV heads of 128, MLP 17408, vocabulary 151936 (untied).
    """
    traced = traced_run(DENSE)

    qkv = 5120 * 7168 / 4
    projection = 5120 * 5120 / 4
    mlp = 3 * 5120 * 17408 / 4
    norms = 2 * 5120 + 2 * 128
    parameters = 2 * (qkv + projection + mlp + norms) + 2 * 151936 * 5120 / 4 + 5120
    by_hand = parameters * (2 + 4 + 12 / 4)
    # Megatron's local layers keep a buffer for the gathered hidden states of a micro-batch.
    by_hand += 2 * 40960 * 5120
    assert traced["live_after"]["update"] == pytest.approx(by_hand, rel=0.01)


def test_a_frozen_reference_or_teacher_is_in_host_memory() -> None:
    """The GPU has no second copy of the weights, before and after the pass of the reference."""
    live = traced_run(DENSE)["live_after"]

    assert live["take reference"] == pytest.approx(live["update"], abs=2**20)
    # A copy of the weights has gigabytes; log-probs of the pass are added, its buffers are freed.
    of_pass = live["log-probs: reference"] - live["take reference"]
    assert abs(of_pass) < 8 * 2**20


def _other_ranks() -> dict[str, tuple[str, int]]:
    """A middle rank and the last one of every run with more than one."""
    cases = {}
    for config in RUNS:
        world_size = ranks_to_start(load_config(ROOT / config, []).config)
        for rank in sorted({world_size // 2 - 1, world_size - 1}):
            if rank > 0:
                cases[f"{config} on rank {rank}"] = (config, rank)
    return cases


OTHER_RANKS = _other_ranks()


@pytest.mark.parametrize("name", in_tiers(OTHER_RANKS, every=len(OTHER_RANKS)))
def test_a_middle_and_the_last_rank_execute(name: str) -> None:
    config, rank = OTHER_RANKS[name]
    traced = trace(request_of(config, rank=rank, paths=PATHS))

    assert traced["rank"] == rank
    assert not traced["unknown_shapes"]
    assert not unreviewed_waits(traced["host_syncs"])
    if traced["place"]["pp"] > 0:
        # The stages before the last one have no output layer.
        parts = {label["module"] for label in traced["peaks"]["update"]["by_label"]}
        assert not any("embedding" in part for part in parts)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["broadcast", "ipc", "disk"])
def test_weights_reach_the_buckets_of_each_transport(transport: str) -> None:
    config = "configs/runs/grpo-qwen3-4b-1n8g-tp1.yaml"
    override = f"rollout.sync.transport={transport}"
    traced = trace(request_of(config, paths=("export",), overrides=[override]))

    peak = traced["peaks"]["export"]
    labels = [label for label in peak["by_label"] if label["phase"] == "export"]
    bucket = max(label["num_bytes"] for label in labels)
    # 2560 x 151936 values of the embedding are larger than a bucket.
    assert bucket >= 2 * 2560 * 151936


def left_after_update(traced: dict[str, Any]) -> float:
    """GiB beside the state."""
    left: float = traced["live_after"]["update"] - traced["peaks"]["build"]["num_bytes"]
    return left / GIB


@pytest.mark.full
def test_an_update_leaves_no_graph_of_recomputed_experts() -> None:
    """Megatron's dispatcher kept the router's probabilities, and so each layer's input and its
    gradient until the next forward pass, which the next update had beside its own. It kept the
    order of the tokens too.

    Two layers, and a micro-batch of 30,720 tokens on each of 32 ranks: a hidden state has 0.12 GiB.
    """
    full = [
        "parallel.tp=1",
        "parallel.sequence_parallel=false",
        "parallel.recompute.granularity=full",
        "batch.tokens_per_microbatch=30720",
    ]
    request = request_of(EXPERTS, overrides=full, num_groups=32)
    assert left_after_update(trace(request)) < 0.02

    kept = ("pacs_megatron.policy.model", "    dispatcher.probs = None\n", "    pass\n")
    assert left_after_update(trace(request, kept)) > 0.2


def test_reviewed_functions_of_the_product_exist() -> None:
    for place in yaml.safe_load(HOST_SYNCS.read_text()):
        file, _, function = place.rpartition(":")
        if file.startswith("pacs_megatron/"):
            name = function.rpartition(".")[2]
            assert f"def {name}(" in (ROOT / file).read_text(), place


INJECTED: dict[str, tuple[Change, str]] = {
    "samples on the host": (
        (
            "pacs_megatron.policy.microbatch",
            "torch.from_numpy(np.repeat(rows, response_lens)).to(device)",
            "torch.from_numpy(np.repeat(rows, response_lens))",
        ),
        r"a CPU tensor \[\d+\] among CUDA tensors at pacs_megatron/objectives/.*py:\d+",
    ),
    "log-probs on the host": (
        (
            "pacs_megatron.policy.microbatch",
            "_concat([tokens.sampler_logprobs[part] for part in slices]).to(device)",
            "_concat([tokens.sampler_logprobs[part] for part in slices])",
        ),
        r"a CPU tensor \[\d+\] among CUDA tensors at pacs_megatron/.*py:\d+",
    ),
    "a host tensor over NCCL": (
        (
            "pacs_megatron.policy.head",
            "dist.all_reduce(tensor, op=op, group=self.group)",
            "dist.all_reduce(tensor.cpu(), op=op, group=self.group)",
        ),
        r"allreduce_ of a CPU tensor over nccl at pacs_megatron/policy/head.py:\d+",
    ),
    "weights that are not awaited": (
        ("pacs_megatron.policy.model", "        _await_parameters(self.output_layer)\n", ""),
        r"AssertionError",
    ),
    "a branch of CUDA alone": (
        (
            "pacs_megatron.policy.weights",
            "torch.cuda.synchronize(",
            "torch.cuda.synchronise(",
        ),
        r"policy/weights.py\", line \d+(.|\n)*has no attribute 'synchronise'",
    ),
    "a size that does not fit": (
        (
            "pacs_megatron.policy.model",
            "            labels[0].index_select(0, predicting),",
            "            labels[0],",
        ),
        r"policy/head.py\", line \d+(.|\n)*Error: .*\d+",
    ),
}


@pytest.mark.parametrize("name", in_test(INJECTED, "samples on the host"))
def test_an_injected_error_is_found_at_its_place(name: str) -> None:
    change, message = INJECTED[name]
    with pytest.raises(AssertionError) as raised:
        trace(request_of(DENSE, paths=("step", "reference")), change)
    assert "is not there once" not in str(raised.value)
    assert re.search(message, str(raised.value)), raised.value


@pytest.mark.full
def test_an_injected_wait_is_found_at_its_place() -> None:
    change = (
        "pacs_megatron.policy.microbatch",
        "            report |= self._mismatch(",
        "            loss.item(); report |= self._mismatch(",
    )
    source = (ROOT / "pacs_megatron" / "policy" / "microbatch.py").read_text()
    line = source[: source.index(change[1])].count("\n") + 1

    traced = trace(request_of(DENSE), change)
    assert unreviewed_waits(traced["host_syncs"]) == [
        f"item in pacs_megatron/policy/microbatch.py:UpdateLoss.__call__, line {line}"
    ]
