"""`plan` counts bytes as a live Megatron model holds them: parameters, gradient buffers, optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pacs_megatron.config import RunConfig
from pacs_megatron.config.layout import layout_of
from pacs_megatron.launch import memory
from pacs_megatron.models import load_spec, num_parameters
from tests.support.policy_cases import make_policy
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_tiny_qwen3

CASES: dict[str, tuple[int, dict[str, Any], bool]] = {
    "one": (1, {}, False),
    "tp2-tied": (2, {"tp": 2}, True),
    "pp2-tied": (2, {"pp": 2}, True),
    "tp2pp2": (4, {"tp": 2, "pp": 2}, False),
    "dp2-distopt": (2, {"distributed_optimizer": True}, False),
    "pp2dp2-distopt-tied": (4, {"pp": 2, "distributed_optimizer": True}, True),
}


@dataclass(frozen=True)
class Live:
    stage: int
    parameters: int
    gradients: int
    moments: int
    masters: int


def run_config(dtype: str, parallel: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "x", "steps": 1},
            "model": {"path": "x"},
            "precision": {"dtype": dtype},
            "parallel": parallel,
            "objective": {"name": "pacs"},
            "batch": {"prompts_per_step": 8, "samples_per_prompt": 2, "tokens_per_microbatch": 2048},
            "rollout": {"engine": "embedded", "sampling": {"max_response_tokens": 1024}},
            "reward": {"name": "math"},
            "data": {"train": {"path": "x", "preset": "gsm8k"}},
            "optimizer": {"lr": 1e-6},
        }
    )


def live_bytes(folder: Path, world: int, dtype: str, parallel: dict[str, Any]) -> list[Live]:
    def on_rank(_rank: int, size: int) -> Live:
        policy = make_policy(folder, size, dtype=dtype, **parallel)
        parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
        buffers = [b for chunk in policy.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        moments = masters = 0
        weights = {p.data_ptr() for p in parameters}
        for part in policy.optimizer.parts():
            for group in part.optimizer.param_groups:
                for held in group["params"]:
                    state = part.optimizer.state[held]
                    moments += sum(state[name].nbytes for name in ("exp_avg", "exp_avg_sq"))
                    if held.dtype == torch.float32 and dtype == "bf16" and held.data_ptr() not in weights:
                        masters += held.nbytes
        return Live(
            stage=policy.rank.pp,
            parameters=sum(p.nbytes for p in parameters),
            gradients=sum(b.grad_data.nbytes for b in buffers),
            moments=moments,
            masters=masters,
        )

    return run_ranks(on_rank, world, timeout=120)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", list(CASES))
def test_bytes_are_exact(case: str, dtype: str, tmp_path: Path) -> None:
    world, parallel, tied = CASES[case]
    folder = make_tiny_qwen3(tmp_path / "model", tied=tied, num_hidden_layers=4, vocab_size=301)
    spec = load_spec(folder)
    config = run_config(dtype, parallel)
    layout = layout_of(config, world)
    live = live_bytes(folder, world, dtype, parallel)
    for stage in range(layout.pp):
        ranks = [found for found in live if found.stage == stage]
        planned = {item.name.split(" (")[0]: item.num_bytes for item in memory.state_items(config, spec, layout, stage)}
        padding = planned["gradients"] / 4 - memory.rank_parameters(spec, layout, stage).total
        width = 2 if dtype == "bf16" else 4
        for found in ranks:
            # Planned weights include the padding of the distributed optimizer's buffer, which live tensors leave out.
            assert found.parameters == planned["weights"] - padding * width
            assert found.gradients == planned["gradients"]
        if not config.parallel.distributed_optimizer:
            assert padding == 0
            assert all(found.moments == planned["Adam moments"] for found in ranks)
            assert all(found.masters == planned.get("master weights", 0) for found in ranks)
        else:
            # A shard is an equal cut of the padded buffer: the fullest rank holds it whole, all together the rest.
            assert max(found.moments for found in ranks) <= planned["Adam moments"]
            assert sum(found.moments for found in ranks) == (planned["Adam moments"] / 8 * layout.dp - padding) * 8
            assert sum(found.masters for found in ranks) * 2 == (
                sum(f.moments for f in ranks) if dtype == "bf16" else 0
            )


def test_parameter_count_is_megatrons_own(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model", tied=False, vocab_size=272)
    spec = load_spec(folder)

    def on_rank(_rank: int, size: int) -> int:
        policy = make_policy(folder, size)
        return sum(p.numel() for chunk in policy.chunks for p in chunk.parameters())

    (held,) = run_ranks(on_rank, 1, timeout=60)
    config = run_config("fp32", {})
    padded = memory.rank_parameters(spec, layout_of(config, 1), 0).total
    assert held == padded
    padding_rows = -(-spec.vocab_size // 128) * 128 - spec.vocab_size
    assert held - 2 * padding_rows * spec.hidden_size == num_parameters(spec)


def test_chunk_of_logits_is_the_heads() -> None:
    from pacs_megatron.policy import head

    assert memory.LOGITS_PER_CHUNK == head.LOGITS_PER_CHUNK
