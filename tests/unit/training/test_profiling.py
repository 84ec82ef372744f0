"""The line of a step and its metrics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pacs_megatron.config import load_config
from pacs_megatron.models.flops import PassedTokens, total_flops
from pacs_megatron.observability.spans import Timer
from pacs_megatron.training import profiling
from pacs_megatron.workbench.plan.known_models import find_spec
from tests.support.servers.fake_sglang import FakeSglang
from tests.support.tiny_run import write_tiny_run

SECONDS = {
    "step": 40.0,
    "rollout": 24.0,
    "update": 10.0,
    "update/forward_backward": 9.0,
    "logprobs": 2.0,
}
TIMES = {f"time/{path}_s": value for path, value in SECONDS.items()} | {"tokens_per_s": 800.0}


def run_of(gpu: str | None, num_ranks: int) -> Any:
    """A run whose policy has passed some tokens."""
    spec = find_spec("Qwen/Qwen3-8B")
    forward = PassedTokens(1e6, 1e9, 5e5)
    trained = PassedTokens(2e6, 2e9, 1e6)
    policy = SimpleNamespace(
        spec=spec,
        table=SimpleNamespace(padded_vocab=151936),
        num_adapted=None,
        take_tokens=lambda: (forward, trained),
    )
    return SimpleNamespace(
        models=[policy],
        rank=SimpleNamespace(layout=SimpleNamespace(world_size=num_ranks)),
        config=SimpleNamespace(resources=SimpleNamespace(gpu=gpu)),
    )


def test_the_speed_is_of_one_gpu() -> None:
    run = run_of("h100", 8)
    metrics = profiling._speed(cast("Any", run), TIMES)
    forward, trained = run.models[0].take_tokens()
    flops = total_flops(run.models[0].spec, 151936, forward, trained)
    assert metrics == {
        "speed/tokens_per_s_per_gpu": 100.0,
        "speed/tflops_per_gpu": pytest.approx(flops / 8 / 12.0 / 1e12),
        "speed/mfu": pytest.approx(flops / 8 / 12.0 / 989e12),
        "speed/step_mfu": pytest.approx(flops / 8 / 40.0 / 989e12),
    }
    assert profiling._speed(cast("Any", run_of(None, 8)), TIMES).keys() == {
        "speed/tokens_per_s_per_gpu",
        "speed/tflops_per_gpu",
    }


def test_a_step_without_training_has_no_flops() -> None:
    run = run_of("h100", 8)
    run.models[0].take_tokens = lambda: (PassedTokens(), PassedTokens())
    assert profiling._speed(cast("Any", run), {"time/step_s": 4.0}) == {}


def test_the_line_has_the_longest_phase_first() -> None:
    metrics = {
        "speed/tokens_per_s_per_gpu": 1234.5,
        "speed/tflops_per_gpu": 214.26,
        "speed/mfu": 0.2166,
        "speed/step_mfu": 0.065,
    }
    assert profiling.step_line(5, SECONDS, metrics, "GPU") == (
        "step 5: 40.0 s (rollout 60 %, update 25 %, other 10 %, logprobs 5 %), 1,234 tokens/s a "
        "GPU, 214 TFLOP/s a GPU in training, MFU 21.7 % (6.5 % of the step)"
    )
    assert profiling.step_line(5, {"step": 2.0}, {}, "rank") == "step 5: 2.0 s (other 100 %)"


class Client:
    """The driver, which knows one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[dict[str, Any]] = []

    def call(self, request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        self.requests.append(request)
        return {"urls": [self.url]}, {}


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_profiles_the_servers_that_the_driver_names(tmp_path: Path, rank: int) -> None:
    with FakeSglang() as server:
        overrides = (
            "observability.profile={steps: [2], ranks: [3], servers: true}",
            f"rollout={{engine: sglang, urls: ['{server.url}'], sync: {{transport: disk}}, "
            "sampling: {max_response_tokens: 16}}",
        )
        config = load_config(write_tiny_run(tmp_path, tmp_path), overrides).config
        client = Client(server.url)
        layout = SimpleNamespace(world_size=2)
        run = SimpleNamespace(
            config=config,
            run_dir=tmp_path,
            rank=SimpleNamespace(rank=rank, device=torch.device("cpu"), layout=layout),
            driver=client if rank == 0 else None,
            timer=Timer(),
            rollouts=SimpleNamespace(),
            models=[],
        )
        profiled = profiling.Profiling(cast("Any", run))
        for step in (1, 2):
            with profiled.step(step), profiled.servers(step):
                pass
        is_first = rank == 0
        assert client.requests == ([{"op": "servers"}] if is_first else [])
        assert len(server.profiles) == len(list(tmp_path.glob("profile/server-*"))) == is_first
