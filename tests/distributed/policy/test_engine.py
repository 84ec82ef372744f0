"""The real Megatron policy against plain PyTorch + transformers, at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.policies.plain_trainer import PlainTrainer, pacs_loss
from tests.support.policies.policy_cases import (
    logprobs_by_row,
    make_part,
    make_policy,
    random_step,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.tiers import in_test
from tests.support.tiny_models import make_tiny_qwen3

LAYOUTS = {
    "one": {"world": 1},
    "tp2": {"world": 2, "tp": 2},
    "tp2-sp": {"world": 2, "tp": 2, "sequence_parallel": True},
    "pp2": {"world": 2, "pp": 2},
    "tp2pp2": {"world": 4, "tp": 2, "pp": 2},
    "dp2": {"world": 2},
    "dp2-distopt": {"world": 2, "distributed_optimizer": True},
    "tp2dp2": {"world": 4, "tp": 2},
}
NUM_STEPS = 3


def run(folder: Path, case: dict[str, Any], budget: int, dtype: str = "fp32") -> dict[str, Any]:
    """Log-probs before, three PACS updates, log-probs and weights after; merged over ranks."""
    options = {k: v for k, v in case.items() if k != "world"}
    steps = [random_step(seed) for seed in range(NUM_STEPS)]

    def on_rank(_rank: int, world: int) -> dict[str, Any]:
        policy = make_policy(folder, world, tokens_per_microbatch=budget, dtype=dtype, **options)
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        before = logprobs_by_row(policy, make_part(*steps[0], policy, budget))
        reports = train(policy, objective, steps, tokens_per_microbatch=budget)
        after = logprobs_by_row(policy, make_part(*steps[0], policy, budget))
        weights = (
            {name: tensor.clone().numpy() for name, tensor in policy.export_weights()}
            if dtype == "fp32"
            else {}
        )
        return {
            "before": before,
            "after": after,
            "loss": [r.metrics["objective/loss"] for r in reports],
            "norm": [r.grad_norm for r in reports],
            "weights": weights,
            "score_passes": policy.num_passes["score"],
        }

    results = run_ranks(on_rank, case["world"])
    merged = dict(results[0])
    for key in ("before", "after"):
        merged[key] = {}
        for result in results:
            merged[key] |= result[key]
    for result in results:
        assert result["loss"] == merged["loss"] and result["norm"] == merged["norm"]
    return merged


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = make_tiny_qwen3(
        tmp_path_factory.mktemp("qwen3"), tied=request.param, num_hidden_layers=4
    )
    trainer = PlainTrainer(folder)
    steps = [random_step(seed) for seed in range(NUM_STEPS)]
    start = parameters_of(trainer)
    before = trainer.logprobs(*steps[0])
    numbers = []
    for facts, tokens in steps:
        starts = trainer.logprobs(facts, tokens)
        numbers.append(trainer.update(facts, tokens, pacs_loss(starts, facts)))
    after = trainer.logprobs(*steps[0])
    return {
        "folder": folder,
        "before": [logp.numpy() for logp in before],
        "after": [logp.numpy() for logp in after],
        "loss": [loss for loss, _ in numbers],
        "norm": [norm for _, norm in numbers],
        "weights": parameters_of(trainer),
        "start": start,
    }


def parameters_of(trainer: PlainTrainer) -> dict[str, np.ndarray]:
    named = trainer.model.named_parameters()
    return {name: parameter.detach().numpy().copy() for name, parameter in named}


@pytest.mark.parametrize("layout", in_test(LAYOUTS, "one", "tp2-sp", "tp2pp2", "dp2-distopt"))
def test_three_pacs_updates_equal_the_reference(reference: dict[str, Any], layout: str) -> None:
    got = run(reference["folder"], LAYOUTS[layout], budget=64)
    assert got["score_passes"] == 0, "step_start, one update a step: no score pass"
    for row, expected in enumerate(reference["before"]):
        np.testing.assert_allclose(got["before"][row], expected, atol=2e-5)
    np.testing.assert_allclose(got["loss"], reference["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["norm"], reference["norm"], rtol=1e-4)
    for row, expected in enumerate(reference["after"]):
        np.testing.assert_allclose(got["after"][row], expected, atol=5e-5)
    assert set(got["weights"]) == set(reference["weights"])
    for name, expected in reference["weights"].items():
        # Relative to how far the weights moved: three steps of Adam at lr 1e-3 move each by up to
        # 3e-3.
        np.testing.assert_allclose(got["weights"][name], expected, atol=3e-5, err_msg=name)
        assert np.abs(expected - reference["start"][name]).max() > 1e-4, (
            "the reference did not train this weight"
        )


def test_the_cut_into_microbatches_does_not_matter(reference: dict[str, Any]) -> None:
    """One sample a micro-batch, siblings together, everything in one: the same update."""
    runs = [run(reference["folder"], LAYOUTS["one"], budget) for budget in (23, 64, 10_000)]
    runs.append(run(reference["folder"], LAYOUTS["dp2"], 32))
    for other in runs[1:]:
        np.testing.assert_allclose(other["loss"], runs[0]["loss"], rtol=1e-5)
        np.testing.assert_allclose(other["norm"], runs[0]["norm"], rtol=1e-5)
        for name, weight in runs[0]["weights"].items():
            np.testing.assert_allclose(
                other["weights"][name], weight, rtol=1e-5, atol=2e-6, err_msg=name
            )


def test_every_microbatch_of_every_pass_is_reported(tiny_qwen3: Path) -> None:
    """On every stage: the watchdog counts it as progress."""

    def on_rank(_rank: int, world: int) -> tuple[int, list[int]]:
        policy = make_policy(tiny_qwen3, world, tokens_per_microbatch=52, pp=2)
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        minibatch = make_part(*random_step(0), policy, 52)
        reports: list[int] = []
        counts = []
        policy.on_microbatch(lambda: reports.append(1))
        policy.logprobs(minibatch, "step_start")
        counts.append(len(reports))
        policy.update(minibatch, objective, None)
        counts.append(len(reports) - counts[0])
        return len(minibatch.plan.by_dp_rank[0]), counts

    for planned, (in_pass, in_update) in run_ranks(on_rank, 2):
        assert planned > 2
        assert in_pass == planned
        assert in_update > 1  # without the samples whose gradient is zero
