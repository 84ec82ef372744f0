"""The score pass: zero at unchanged weights bit for bit, nothing where none is needed, the plain
formulas elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.batching.split import split_by_group
from pacs_megatron.batching.tables import select_tokens
from pacs_megatron.config.schema import BatchOptions
from pacs_megatron.contracts import MiniBatch, SampleFacts, TokenBuffers
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.training.distribute import cut_step
from tests.support.policies.plain_trainer import PlainTrainer, pacs_loss
from tests.support.policies.policy_cases import make_part, make_policy, random_step, with_passes
from tests.support.ranks import run_ranks
from tests.support.tiers import in_test
from tests.support.tiny_families import make_family

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {"distributed_optimizer": True}),
    "recompute": (1, {"recompute": {"granularity": "full"}}),
}
FULL = {"recompute": {"granularity": "full"}}
SELECTIVE = {"recompute": {"granularity": "selective", "modules": ["moe"]}}
LAYOUTS_OF_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "recompute": (1, FULL),
    "pp2-recompute-experts": (2, {"pp": 2} | SELECTIVE),
}
BUDGET = 96
"""Tokens; every group of `random_step` fits, and a mini-batch needs several micro-batches."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shape = {"vocab_size": 272, "num_hidden_layers": 4}
    return {
        family: make_family(tmp_path_factory.mktemp(family), family, **shape)
        for family in ("qwen3", "qwen3_moe")
    }


def parts_of(
    policy: Any,
    objective: Any,
    facts: SampleFacts,
    tokens: TokenBuffers,
    updates: int,
    groups: Any = "apart",
    epochs: int = 1,
) -> list[MiniBatch]:
    return cut_step(
        facts,
        tokens if policy.rank.rank == 0 else None,
        policy.rank,
        BatchOptions(
            prompts_per_step=4,
            samples_per_prompt=4,
            updates_per_step=updates,
            tokens_per_microbatch=BUDGET,
            groups=groups,
            epochs=epochs,
        ),
        objective,
    )


@pytest.mark.parametrize("dtype", in_test(["fp32", "bf16"], "bf16"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_at_unchanged_weights_are_zero_bit_for_bit(
    folders: dict[str, Path], layout: str, dtype: str
) -> None:
    _check_scores_at_unchanged_weights(folders["qwen3"], *LAYOUTS[layout], dtype)


@pytest.mark.parametrize("dtype", in_test(["fp32", "bf16"], "fp32"))
@pytest.mark.parametrize("layout", in_test(LAYOUTS_OF_EXPERTS, "cp2", "ep2"))
def test_scores_of_experts_at_unchanged_weights_are_zero_bit_for_bit(
    folders: dict[str, Path], layout: str, dtype: str
) -> None:
    """Also of passes that replay the experts of an earlier one, beside padding."""
    _check_scores_at_unchanged_weights(folders["qwen3_moe"], *LAYOUTS_OF_EXPERTS[layout], dtype)


def _check_scores_at_unchanged_weights(
    folder: Path, world: int, options: dict[str, Any], dtype: Any
) -> None:
    facts, tokens = random_step(7)

    def on_rank(_rank: int, world: int) -> dict[str, Any]:
        policy = make_policy(folder, world, tokens_per_microbatch=BUDGET, dtype=dtype, **options)
        start = build_objective(PacsOptions(name="pacs"), updates_per_step=2)
        frozen = build_objective(PacsOptions(name="pacs", reference="frozen"), updates_per_step=1)
        minibatches = []
        for minibatch in parts_of(policy, start, facts, tokens, 2):
            starts = policy.logprobs(minibatch, "step_start")
            minibatches.append(replace(minibatch, step_start_logprobs=starts, routes=policy.routes))
        found: dict[str, Any] = {
            "start": [policy.scores(minibatch, start) for minibatch in minibatches]
        }
        policy.take_reference(reset_optimizer=False)
        minibatches = [
            replace(minibatch, reference_logprobs=policy.logprobs(minibatch, "reference"))
            for minibatch in minibatches
        ]
        found["frozen"] = [policy.scores(minibatch, frozen) for minibatch in minibatches]
        drifts = []
        for minibatch in minibatches:
            report = policy.update(replace(minibatch, index=1), start, None)
            drifts.append(report.metrics["pacs/score_drift_max"])
        moved = policy.scores(minibatches[0], start)
        again = policy.scores(minibatches[0], frozen)
        return found | {"drifts": drifts, "moved": moved, "moved_frozen": again}

    results = run_ranks(on_rank, world)
    for result in results:
        for scores in result["start"] + result["frozen"]:
            assert scores.dtype == torch.float64 and len(scores) == facts.num_samples // 2
            assert torch.equal(scores, torch.zeros_like(scores))
        # The second update's scores are not zero any more, and its forward still reproduces them.
        assert result["drifts"] == [0.0, 0.0]
        assert float(result["moved"].abs().min()) > 0
        assert torch.equal(result["moved"], results[0]["moved"]), "the same bits on every rank"
        assert torch.equal(result["moved"], result["moved_frozen"]), (
            "the snapshot is the policy of the step's start"
        )


def test_the_first_update_against_the_steps_start_needs_no_forward(tiny_qwen3: Path) -> None:
    """Counted, and the coefficients are objective.md's closed forms."""
    facts, tokens = random_step(3, num_groups=6)

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(tiny_qwen3, world)
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        assert not objective.logprob_passes(0) and not objective.statistics(0)
        minibatch = make_part(facts, tokens, policy)
        prepared = objective.prepare(None, minibatch.facts, objective.prepare_step(minibatch.facts))
        report = policy.update(minibatch, objective, None)
        return (
            policy.num_passes.total(),
            prepared.per_sample["coefficient"].numpy(),
            dict(report.metrics),
        )

    ((passes, coefficients, metrics),) = run_ranks(on_rank, 1)
    assert passes == 0
    assert "pacs/score_drift_max" not in metrics
    kinds = set()
    for group in range(facts.num_groups):
        rows = np.flatnonzero(facts.groups == group)
        size = len(rows)
        right = int(facts.labels[rows].sum())
        for row in rows:
            if right in (0, size):
                expected = 0.0
            elif facts.labels[row] == 1:
                expected = -(size**2) / (4 * right * (size - 1)) / facts.num_samples
            else:
                expected = size**2 / (4 * (size - right) * (size - 1)) / facts.num_samples
            kinds.add(expected > 0)
            np.testing.assert_allclose(coefficients[row], expected, rtol=1e-12, atol=1e-18)
    assert kinds == {True, False}


def test_the_first_mini_batch_keeps_groups_together_where_a_later_epoch_scores_it(
    tiny_qwen3: Path,
) -> None:
    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(tiny_qwen3, world)
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=2)
        cuts = (
            parts_of(policy, objective, *random_step(3), 2, "together", epochs) for epochs in (1, 2)
        )
        return [[bool(part.plan.together.all()) for part in parts] for parts in cuts]

    assert run_ranks(on_rank, 1)[0] == [[False, True], [True, True]]


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        *((layout, "apart") for layout in ("tp2-sp", "cp2", "dp2")),
        *((layout, "together") for layout in ("one", "pp2", "vpp2")),
        *(pytest.param(layout, "apart", marks=pytest.mark.full) for layout in ("one", "pp2")),
    ],
)
def test_two_updates_a_step_equal_the_plain_loop(
    folders: dict[str, Path], layout: str, groups: str
) -> None:
    """Two steps of two updates.

    The second update of each needs the scores of the current weights.
    """
    world, options = LAYOUTS[layout]
    folder = folders["qwen3"]
    steps = [random_step(seed) for seed in (11, 12)]
    trainer = PlainTrainer(folder)
    expected = []
    for facts, tokens in steps:
        cuts = [
            (facts.select(rows), select_tokens(tokens, rows, rows))
            for rows in split_by_group(facts, 2)
        ]
        starts = [trainer.logprobs(*cut) for cut in cuts]
        expected += [
            trainer.update(*cut, pacs_loss(start, cut[0]))
            for cut, start in zip(cuts, starts, strict=True)
        ]

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(folder, world, tokens_per_microbatch=BUDGET, **options)
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=2)
        reports = []
        for facts, tokens in steps:
            minibatches = [
                with_passes(policy, objective, minibatch)
                for minibatch in parts_of(policy, objective, facts, tokens, 2, groups)
            ]
            reports += [policy.update(minibatch, objective, None) for minibatch in minibatches]
        weights = {name: tensor.clone().numpy() for name, tensor in policy.export_weights()}
        return (
            [(r.metrics["objective/loss"], r.grad_norm) for r in reports],
            dict(policy.num_passes),
            weights,
        )

    numbers, passes, weights = run_ranks(on_rank, world)[0]
    # Only the second update of a step depends on log-probs; with groups together its own forward
    # computes the scores.
    assert passes == ({"step_start": 2, "score": 2} if groups == "apart" else {"step_start": 2})
    assert abs(numbers[1][0] - np.log(2)) > 1e-3, "psi is not zero at the second update"
    np.testing.assert_allclose(numbers, expected, rtol=2e-5)
    for name, weight in trainer.weights().items():
        np.testing.assert_allclose(weights[name], weight, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("layout", ["one", "dp2", "pp2"])
@pytest.mark.parametrize("dtype", in_test(["fp32", "bf16"], "bf16"))
def test_a_frozen_reference_and_its_hard_reset(
    folders: dict[str, Path], layout: str, dtype: str
) -> None:
    """Four steps, reset before the third: Adam restarts there, weights and schedule continue."""
    world, options = LAYOUTS[layout]
    folder = folders["qwen3"]
    steps = [random_step(seed) for seed in range(4)]
    reset_at = 2
    trainer = PlainTrainer(folder)
    expected: list[tuple[float, float]] = []
    references: list[list[torch.Tensor]] = []
    for number, step in enumerate(steps):
        if number in (0, reset_at):
            references = [trainer.logprobs(*later) for later in steps]
        if number == reset_at:
            trainer.reset_moments()
        expected.append(trainer.update(*step, pacs_loss(references[number], step[0])))

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(folder, world, tokens_per_microbatch=BUDGET, dtype=dtype, **options)
        objective = build_objective(
            PacsOptions(name="pacs", reference="frozen"), updates_per_step=1
        )
        policy.take_reference(reset_optimizer=False)
        reports = []
        zeros = []
        for number, step in enumerate(steps):
            if number == reset_at:
                before = [p.detach().clone() for p in policy.optimizer.megatron.get_parameters()]
                policy.take_reference(reset_optimizer=True)
                after = list(policy.optimizer.megatron.get_parameters())
                zeros = []
                for adam in policy.optimizer.optimizers():
                    for state in adam.optimizer.state.values():
                        for value in state.values():
                            if torch.is_tensor(value) and value.numel():
                                zeros.append(float(value.abs().max()))
                assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
                assert policy.optimizer.num_updates == reset_at
            minibatch = make_part(*step, policy, BUDGET)
            minibatch = replace(
                minibatch, reference_logprobs=policy.logprobs(minibatch, "reference")
            )
            reports.append(policy.update(minibatch, objective, None))
        weights = {name: tensor.float().numpy() for name, tensor in policy.export_weights()}
        return [(r.metrics["objective/loss"], r.grad_norm) for r in reports], zeros, weights

    numbers, zeros, weights = run_ranks(on_rank, world)[0]
    assert zeros and set(zeros) == {0.0}
    if dtype == "bf16":
        # Stated tolerance: a log-ratio has an error of about 0.01 a token, summed over up to 13
        # tokens.
        np.testing.assert_allclose([n[0] for n in numbers], [e[0] for e in expected], atol=0.1)
        return
    np.testing.assert_allclose(numbers, expected, rtol=3e-5)
    for name, weight in trainer.weights().items():
        np.testing.assert_allclose(weights[name], weight, atol=1e-5, err_msg=name)
