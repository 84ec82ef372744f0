"""The entropy at the start of a step: over all samples, also those that the first update skips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.workbench.certify.reference_model import Model
from tests.support.policies.policy_cases import make_part, make_policy, random_step
from tests.support.ranks import run_ranks
from tests.support.tiers import in_test

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2-pp2": (4, {"pp": 2, "distributed_optimizer": True}),
}


@pytest.mark.parametrize("layout", in_test(LAYOUTS, "dp2-pp2"))
def test_entropy_of_all_samples_equals_the_model_in_float64(tiny_qwen3: Path, layout: str) -> None:
    """Half of the groups have one class, so the first update of PACS skips them."""
    world, options = LAYOUTS[layout]
    facts, tokens = random_step(3)
    labels = np.where(facts.groups < 2, facts.labels, 1.0)
    facts = replace(facts, labels=labels, rewards=labels)

    model = Model(tiny_qwen3, 1.0)
    expected = []
    with torch.no_grad():
        for row in range(facts.num_samples):
            ids = tokens.token_ids[tokens.offsets[row] : tokens.offsets[row + 1]]
            expected.append(model.sample(ids, int(facts.prompt_lens[row]), [])[1])
    is_trained = [len(set(labels[facts.groups == group])) == 2 for group in facts.groups]
    of_trained = torch.cat(
        [one for one, trained in zip(expected, is_trained, strict=True) if trained]
    )

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(tiny_qwen3, world, tokens_per_microbatch=96, **options)
        minibatch = make_part(facts, tokens, policy, 96)
        without = policy.logprobs(minibatch, "step_start")
        assert policy.step_start_entropy == (0.0, 0.0)
        policy.measures_entropy = True
        with_entropy = policy.logprobs(minibatch, "step_start")
        torch.testing.assert_close(with_entropy, without, rtol=0, atol=0)

        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        report = policy.update(minibatch, objective, None)
        return policy.step_start_entropy, report.metrics["policy/entropy"]

    for (total, count), of_update in run_ranks(on_rank, world):
        of_all = torch.cat(expected)
        assert count == len(of_all) == int(facts.response_lens.sum())
        assert total / count == pytest.approx(float(of_all.mean()), rel=1e-5)
        assert of_update == pytest.approx(float(of_trained.mean()), rel=1e-5)
        assert abs(of_update - total / count) > 1e-4, "the skipped samples have another entropy"
