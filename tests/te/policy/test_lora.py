"""Adapters on Transformer Engine's layers against LoRA by hand on transformers in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.config.schema import LORA_TARGETS, LoraOptions
from pacs_megatron.models import load_spec, weight_table
from pacs_megatron.models.lora import all_matrices
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.policies.lora_trainer import LoraTrainer, random_matrices
from tests.support.policies.plain_trainer import pacs_loss
from tests.support.policies.policy_cases import logprobs_by_row, make_part, make_policy, train
from tests.support.ranks import run_ranks
from tests.te.cases import FULL, SP, STEPS, TOKENS, Case, model_of
from tests.te.stand_ins import CALLS

LORA: dict[str, Any] = {"rank": 4, "alpha": 6.0}
"""alpha / rank is neither 1 nor a power of two"""
CASES = {
    "one": Case("qwen3"),
    "tp2": Case("qwen2", 2, {"tp": 2}),
    "tp2-sp-distopt": Case("qwen3", 2, SP | {"distributed_optimizer": True}),
    "tp2-sp-recompute-full": Case("qwen3", 2, SP | {"recompute": FULL}),
    "moe-tp2-ep2-sp": Case("qwen3_moe", 2, SP | {"ep": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_three_updates_equal_lora_by_hand(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = model_of(case, tmp_path)
    targets = LORA_TARGETS[:4] if case.family == "qwen3_moe" else LORA_TARGETS
    options = {**LORA, "targets": targets}
    matrices = all_matrices(weight_table(load_spec(model)), LoraOptions(**options))
    start = random_matrices({matrix.name: matrix.shape for matrix in matrices}, seed=3)

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(
            model, world, tokens_per_microbatch=TOKENS, lora=options, **case.parallel
        )
        policy.load_adapters(lambda matrix: torch.from_numpy(start[matrix]))
        kinds = {type(layer).__name__ for layer in policy.models[0].modules() if _is_adapted(layer)}
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        before = logprobs_by_row(policy, make_part(*STEPS[0], policy, TOKENS))
        reports = train(policy, objective, STEPS, tokens_per_microbatch=TOKENS)
        adapters = {name: tensor.clone().numpy() for name, tensor in policy.export_adapters()}
        numbers = [(report.metrics["objective/loss"], report.grad_norm) for report in reports]
        return before, numbers, adapters, kinds, dict(CALLS)

    results = run_ranks(on_rank, case.world)
    before, numbers, adapters, kinds, calls = results[0]
    for other in results[1:]:
        before |= other[0]
    assert kinds == {"TEColumnParallelLinear", "TERowParallelLinear"}
    assert calls["Linear"] > 0
    assert "LayerNormLinear" not in calls, "an adapter has the layer's input, after the norm"

    trainer = LoraTrainer(model, start, **LORA)
    for row, logprobs in enumerate(trainer.logprobs(*STEPS[0])):
        np.testing.assert_allclose(before[row], logprobs.numpy(), atol=2e-5)
    for (facts, tokens), (loss, norm) in zip(STEPS, numbers, strict=True):
        expected = pacs_loss(trainer.logprobs(facts, tokens), facts)
        expected_loss, expected_norm = trainer.update(facts, tokens, expected)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        np.testing.assert_allclose(norm, expected_norm, rtol=6e-5)
    for matrix, values in trainer.adapters().items():
        np.testing.assert_allclose(adapters[matrix], values, atol=5e-6, err_msg=matrix)
        assert np.abs(values - start[matrix]).max() > 1e-4, "not trained by the reference"


def _is_adapted(layer: Any) -> bool:
    return "lora" in dict(layer.named_children())
