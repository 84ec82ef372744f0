"""The GRPO family against the reference with autograd in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.dr_grpo import DrGrpoOptions
from pacs_megatron.objectives.grpo import GrpoOptions
from pacs_megatron.objectives.registry import ObjectiveOptions, build_objective
from pacs_megatron.objectives.shared.base import Objective
from tests.support.policies.objective_reference import (
    Batch,
    assert_metrics_equal,
    flat_reference_loss,
    make_facts,
    objective_gradient,
    objective_scores,
    random_batch,
    reference_advantages,
    token_metric_sums,
)

GRPO = {"name": "grpo"}
MEANS: tuple[dict[str, Any], ...] = (
    {"loss_mean": "token"},
    {"loss_mean": "sequence"},
    {"loss_mean": "dr_grpo", "constant_length": 7},
)


def grpo(updates_per_step: int = 1, **options: Any) -> Objective:
    return build_objective(GrpoOptions(name="grpo", **options), updates_per_step=updates_per_step)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("mean", MEANS, ids=lambda mean: mean["loss_mean"])
def test_loss_and_gradient_match_autograd(mean: dict[str, Any], kl_coef: float) -> None:
    options: dict[str, Any] = {"kl_coef": kl_coef, "clip_low": 0.1, "clip_high": 0.3, **mean}
    for seed in range(3):
        batch = random_batch(seed, spread=0.3)
        objective = grpo(updates_per_step=2, **options)
        prepared = objective.prepare(None, batch.facts, objective.prepare_step(batch.facts))
        gradient, loss = objective_gradient(objective, batch, prepared, cuts=6, seed=seed)

        logprobs = batch.logprobs.clone().requires_grad_(True)
        plain, metrics = flat_reference_loss(GRPO | options, batch, logprobs)
        plain.backward()  # type: ignore[no-untyped-call]
        assert prepared.loss is None
        assert loss == pytest.approx(float(plain.detach()), rel=1e-10)
        np.testing.assert_allclose(gradient, logprobs.grad, rtol=1e-10, atol=1e-15)

        sums = token_metric_sums(objective, batch, prepared)
        assert_metrics_equal(prepared.metrics | sums, metrics)
        assert 0 < sums["grpo/clip_frac"] < 1
        assert (kl_coef > 0) == ("grpo/kl" in sums) == ("grpo/kl" in metrics)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("importance", ["truncate", "mask"])
def test_importance_correction_matches_autograd(importance: Any, index: int) -> None:
    options: dict[str, Any] = {"importance": importance, "importance_cap": 1.3, "kl_coef": 0.2}
    objective = grpo(updates_per_step=2, **options)
    floor = GrpoOptions(name="grpo", **options).importance_floor
    assert floor == (0.5 if importance == "mask" else None)
    batch = random_batch(7, spread=0.3)
    # Groups of one class have equal rewards, so their advantage is zero.
    batch.facts = replace(batch.facts, rewards=batch.facts.labels)
    noise = torch.from_numpy(np.random.default_rng(1).normal(0, 0.6, len(batch.mask)))
    batch.sampler = batch.logprobs + noise
    # At the first update its own log-probs are those of the step's start.
    batch.step_start = batch.logprobs if index == 0 else batch.reference
    prepared = objective.prepare(None, batch.facts, objective.prepare_step(batch.facts))
    gradient, loss = objective_gradient(objective, batch, prepared, cuts=5)

    logprobs = batch.logprobs.clone().requires_grad_(True)
    plain, metrics = flat_reference_loss(GRPO | options, batch, logprobs)
    plain.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(float(plain.detach()), rel=1e-10)
    np.testing.assert_allclose(gradient, logprobs.grad, rtol=1e-10, atol=1e-15)
    without = grpo(updates_per_step=2, kl_coef=0.2)
    assert not torch.allclose(objective_gradient(without, batch, prepared, cuts=5)[0], gradient)

    # Over the tokens of samples with an advantage, whether the engine leaves the other samples out
    # or not.
    sums = token_metric_sums(objective, batch, prepared)
    assert_metrics_equal(prepared.metrics | sums, metrics)
    num_tokens = metrics["grpo/importance_mean"][1]
    assert 0 < num_tokens < float(batch.mask.sum())
    for name in ("grpo/importance_mean", "grpo/importance_cut_frac"):
        assert prepared.denominators[name] == metrics[name][1] == num_tokens
    assert 0.1 < sums["grpo/importance_cut_frac"] < 0.9


def test_importance_of_a_sampler_that_is_the_trainer_changes_nothing() -> None:
    batch = random_batch(8)
    batch = Batch(
        **{**vars(batch), "sampler": batch.logprobs.clone(), "step_start": batch.logprobs}
    )
    plain = grpo()
    corrected = grpo(importance="truncate")
    prepared = plain.prepare(None, batch.facts, plain.prepare_step(batch.facts))
    assert torch.equal(
        objective_gradient(plain, batch, prepared)[0],
        objective_gradient(corrected, batch, prepared)[0],
    )


def test_importance_options_without_use_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"importance_cap=3\.0 does not go with importance=none"):
        GrpoOptions(name="grpo", importance_cap=3.0)
    with pytest.raises(
        ValueError, match=r"importance_floor=0\.1 does not go with importance=truncate"
    ):
        GrpoOptions(name="grpo", importance="truncate", importance_floor=0.1)
    with pytest.raises(ValueError, match=r"importance_floor=3\.0 is not below importance_cap=2\.0"):
        GrpoOptions(name="grpo", importance="mask", importance_floor=3.0)


@pytest.mark.parametrize("updates", [1, 2])
def test_the_first_update_is_the_policy_gradient_with_and_without_stored_log_probs(
    updates: int,
) -> None:
    batch = random_batch(4)
    objective = grpo(updates_per_step=updates, loss_mean="sequence")
    prepared = objective.prepare(None, batch.facts, objective.prepare_step(batch.facts))
    same = Batch(**{**vars(batch), "reference": batch.logprobs.clone()})
    gradient, _ = objective_gradient(objective, same, prepared, cuts=3)
    advantage = torch.from_numpy(reference_advantages(GRPO, batch.facts))[batch.sample_of_token]
    lens = torch.from_numpy(batch.facts.response_lens)[batch.sample_of_token]
    expected = -advantage * batch.mask / (batch.facts.num_samples * lens)
    np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-16)


def test_advantages_come_from_the_whole_rollout_batch_and_survive_any_order() -> None:
    facts = random_batch(6, sizes=(2, 3, 5, 7) * 8).facts
    order = np.random.default_rng(0).permutation(facts.num_samples)
    objective = grpo()
    step = objective.prepare_step(facts)["advantage"]
    shuffled = objective.prepare_step(facts.select(order))["advantage"]
    np.testing.assert_array_equal(shuffled, step[order])
    rows = order[: facts.num_samples // 2]
    minibatch = objective.prepare(None, facts.select(rows), {"advantage": step[rows]})
    expected = reference_advantages(GRPO, facts)[rows]
    np.testing.assert_allclose(minibatch.per_sample["advantage"], expected, rtol=1e-12, atol=1e-13)


def test_equal_rewards_give_exactly_no_gradient_unless_a_kl_term_remains() -> None:
    facts = make_facts(
        [0, 1, 0, 1, 0], [1.0, 0.0, 1.0, 1.0, 1.0], rewards=[0.1, 0.0, 0.1, 1.0, 0.1]
    )
    objective = grpo()
    prepared = objective.prepare(None, facts, objective.prepare_step(facts))
    assert prepared.zero_gradient is not None
    assert prepared.zero_gradient.tolist() == [True, False, True, False, True]
    assert prepared.metrics["grpo/zero_advantage_frac"] == pytest.approx(3 / 5)
    with_kl = grpo(kl_coef=0.1)
    assert with_kl.prepare(None, facts, with_kl.prepare_step(facts)).zero_gradient is None


def test_log_ratios_are_cut_at_20_nats() -> None:
    facts = make_facts([0, 0], [1.0, 0.0], lens=[1, 2])
    batch = Batch(
        facts=facts,
        logprobs=torch.full((3,), -1.0, dtype=torch.float64),
        reference=torch.tensor([-1.0, -16.0, -26.0], dtype=torch.float64),  # log-ratios 0, 15, 25
        mask=torch.ones(3, dtype=torch.float64),
        sample_of_token=torch.tensor([0, 1, 1]),
    )
    objective = build_objective(
        DrGrpoOptions(name="dr_grpo", constant_length=3), updates_per_step=2
    )
    gradient, loss = objective_gradient(
        objective, batch, objective.prepare(None, facts, objective.prepare_step(facts))
    )
    assert loss == pytest.approx((-0.5 + 0.5 * np.exp(15) + 0.5 * np.exp(20)) / 6)
    assert gradient.tolist() == pytest.approx([-0.5 / 6, 0.5 * np.exp(15) / 6, 0.0])


@pytest.mark.parametrize(
    ("name", "mean_log_ratio", "has_gradient"),
    [
        ("gspo", 15.0, True),
        ("gspo", 25.0, False),
        ("luspo", 15.0, True),
        ("luspo", 25.0, False),
        ("rloo", 7.5, True),  # 15 for the response of two tokens
        ("rloo", 12.5, False),
    ],
)
def test_a_response_whose_ratio_is_cut_at_20_nats_has_no_gradient(
    name: str, mean_log_ratio: float, has_gradient: bool
) -> None:
    """The response has a negative advantage, so no clip takes the gradient."""
    facts = make_facts([0, 0], [1.0, 0.0], lens=[1, 2])
    start = torch.tensor([-1.0, -1.0 - mean_log_ratio, -1.0 - mean_log_ratio]).double()
    batch = Batch(
        facts=facts,
        logprobs=torch.full((3,), -1.0, dtype=torch.float64),
        reference=start,
        mask=torch.ones(3, dtype=torch.float64),
        sample_of_token=torch.tensor([0, 1, 1]),
    )
    objective = build_objective(
        TypeAdapter(ObjectiveOptions).validate_python({"name": name}), updates_per_step=2
    )
    scores = objective_scores(objective, batch)
    prepared = objective.prepare(scores, facts, objective.prepare_step(facts))
    gradient, loss = objective_gradient(objective, batch, prepared)

    logprobs = batch.logprobs.clone().requires_grad_(True)
    plain, _ = flat_reference_loss({"name": name}, batch, logprobs)
    plain.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(float(plain.detach()), rel=1e-12)
    np.testing.assert_allclose(gradient, logprobs.grad, rtol=1e-12)
    assert (gradient[1:] != 0).tolist() == [has_gradient] * 2
    assert loss > 1e5, "the loss keeps the value of the limit"


@pytest.mark.parametrize(
    ("estimator", "kl", "slope"), [("k1", -25.0, None), ("k2", 312.5, -25.0), ("k3", None, 0.0)]
)
def test_only_the_exponential_of_a_kl_estimate_is_cut_at_20_nats(
    estimator: str, kl: float | None, slope: float | None
) -> None:
    """q = log pi_reference - log pi is 25."""
    place = "reward" if estimator == "k1" else "loss"
    objective = grpo(kl_coef=0.5, kl_estimator=estimator, kl_in=place)
    step_start = np.array([-26.0], dtype=np.float32)
    reference = np.array([-1.0], dtype=np.float32)
    expected = np.expm1(20.0) - 20.0 if kl is None else kl
    assert objective.sample_kl(step_start, reference) == pytest.approx(expected, rel=1e-12)
    if slope is None:
        return

    facts = make_facts([0, 0], [1.0, 1.0])  # no advantage: the KL is the only term
    batch = Batch(
        facts=facts,
        logprobs=torch.tensor([-26.0, -1.0], dtype=torch.float64),
        reference=torch.full((2,), -1.0, dtype=torch.float64),
        mask=torch.ones(2, dtype=torch.float64),
        sample_of_token=torch.tensor([0, 1]),
        step_start=torch.tensor([-26.0, -1.0], dtype=torch.float64),
    )
    prepared = objective.prepare(None, facts, objective.prepare_step(facts))
    gradient, _ = objective_gradient(objective, batch, prepared)
    assert gradient.tolist() == pytest.approx([0.5 * slope / 2, 0.0], rel=1e-12)


def test_huge_ratios_leave_no_nan() -> None:
    facts = make_facts([0, 0], [1.0, 0.0], lens=[2, 2])
    batch = Batch(
        facts=facts,
        logprobs=torch.tensor([-1.0, -900.0, -1.0, -900.0], dtype=torch.float64),
        reference=torch.tensor([-900.0, -1.0, -900.0, -1.0], dtype=torch.float64),
        mask=torch.ones(4, dtype=torch.float64),
        sample_of_token=torch.tensor([0, 0, 1, 1]),
    )
    objective = grpo(updates_per_step=2, kl_coef=0.1)
    prepared = objective.prepare(None, facts, objective.prepare_step(facts))
    gradient, loss = objective_gradient(objective, batch, prepared)
    assert np.isfinite(loss) and torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("index", "kl_coef", "passes"),
    [
        (0, 0.0, set()),
        (1, 0.0, {"step_start"}),
        (0, 0.1, {"reference"}),
        (1, 0.1, {"step_start", "reference"}),
    ],
)
def test_which_passes_an_update_needs(index: int, kl_coef: float, passes: set[str]) -> None:
    """The first update needs no step-start pass: its ratio is 1 by construction."""
    objective = grpo(updates_per_step=2, kl_coef=kl_coef)
    assert objective.logprob_passes(index) == passes
    assert objective.coupling == "token" and not objective.statistics(index)


def test_bugs_of_the_caller_are_rejected() -> None:
    batch = random_batch(0)
    objective = grpo(updates_per_step=2, kl_coef=0.1)
    prepared = objective.prepare(None, batch.facts, objective.prepare_step(batch.facts))
    with pytest.raises(ValueError, match="has no scores"):
        objective.token_scores(batch.record())
    record = batch.record()
    record.step_start_logprobs = None
    with pytest.raises(ValueError, match="needs step_start log-probs"):
        objective.token_loss(record, prepared)
    record = batch.record()
    record.reference_logprobs = None
    with pytest.raises(ValueError, match="needs reference log-probs"):
        objective.token_loss(record, prepared)
    with pytest.raises(ValueError, match="alone in its group"):
        objective.prepare_step(make_facts([0, 1, 1], [0.0, 1.0, 1.0]))
    with pytest.raises(NonFiniteError, match="0:data/0#1"):
        objective.prepare_step(make_facts([0, 0], [0.0, 1.0], rewards=[0.0, float("nan")]))
