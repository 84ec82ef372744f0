"""The GPU path of the shipped configurations at their true layout and width, with two layers."""

from __future__ import annotations

from typing import Any

import pytest

from pacs_megatron.workbench.trace.rank import TraceRequest
from tests.support.traced_rank import ROOT, trace

RUNS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "configs" / "runs").glob("*.yaml")
    if "quickstart" not in path.name and "fp8" not in path.name
)
PATHS = ("step", "reference", "offload", "export", "checkpoint")
DENSE = "configs/runs/pacs-qwen3-14b-2n8g-tp4.yaml"
EXPERTS = "configs/runs/pacs-qwen3-30b-a3b-4n8g-ep8.yaml"
IN_MAKE_TEST = DENSE
GIB = 2**30


def request_of(config: str, **options: Any) -> TraceRequest:
    return TraceRequest(config=config, num_layers=2, transformer_engine=False, **options)


@pytest.mark.parametrize(
    "config",
    [
        config if config == IN_MAKE_TEST else pytest.param(config, marks=pytest.mark.full)
        for config in RUNS
    ],
)
def test_a_shipped_run_executes(config: str) -> None:
    traced = trace(request_of(config, paths=PATHS))

    assert not traced["unknown_shapes"]
    # Off-loaded, the fake GPU keeps less than a tenth of the state.
    live = traced["live_after"]
    assert live["off-load to the host"] < 0.1 * live["update"]
    # The log-probs of the pass, 4 bytes a response token, are freed meanwhile.
    freed = live["log-probs: reference"] - live["off-load to the device"]
    assert 0 < freed < 2**20
    # Only the head and the layers multiply matrices.
    assert traced["flops"]["forward and backward"] > 0
    assert traced["flops"]["optimizer"] == 0


def test_state_of_two_layers_by_hand() -> None:
    """14B at tp 4, dp 2: bf16 weights, fp32 gradients, and 12 bytes of Adam's state over dp.

    Hidden 5120, 40 query and 8 KV heads of 128, MLP 17408, vocabulary 151936 (untied).
    """
    traced = trace(request_of(DENSE))

    qkv = 5120 * 7168 / 4
    projection = 5120 * 5120 / 4
    mlp = 3 * 5120 * 17408 / 4
    norms = 2 * 5120 + 2 * 128
    parameters = 2 * (qkv + projection + mlp + norms) + 2 * 151936 * 5120 / 4 + 5120
    by_hand = parameters * (2 + 4 + 12 / 2)
    assert traced["live_after"]["update"] == pytest.approx(by_hand, rel=0.02)


@pytest.mark.full
def test_an_update_leaves_no_graph_of_recomputed_experts() -> None:
    """Megatron's dispatcher kept the router's probabilities, and so each layer's input and its
    gradient until the next forward pass: 0.08 GiB a layer here, which the next update had beside
    its own. It kept the order of the tokens too, 1.4 MiB a layer here.
    """
    traced = trace(request_of(EXPERTS))

    left = traced["live_after"]["update"] - traced["peaks"]["build"]["num_bytes"]
    assert left < 0.004 * GIB


DEVICE_ERRORS = {
    "samples-on-the-host": (
        "pacs_megatron.policy.microbatch",
        "torch.from_numpy(np.repeat(rows, response_lens)).to(device)",
        "torch.from_numpy(np.repeat(rows, response_lens))",
    ),
    "log-probs-on-the-host": (
        "pacs_megatron.policy.microbatch",
        "_concat(sampler_logprobs).to(device)",
        "_concat(sampler_logprobs)",
    ),
    "cpu-tensor-over-nccl": (
        "pacs_megatron.policy.head",
        "dist.all_reduce(tensor, op=op, group=self.group)",
        "dist.all_reduce(tensor.cpu(), op=op, group=self.group)",
    ),
    "output-layer-not-awaited": (
        "pacs_megatron.policy.model",
        "        _await_parameters(self.output_layer)\n",
        "",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "samples-on-the-host" else pytest.param(name, marks=pytest.mark.full)
        for name in DEVICE_ERRORS
    ],
)
def test_an_injected_device_error_is_found(name: str) -> None:
    with pytest.raises(AssertionError, match=r"CPU tensor|AssertionError|device"):
        trace(request_of(DENSE), DEVICE_ERRORS[name])
