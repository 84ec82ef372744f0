"""The contract of every objective with the engine."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from pacs_megatron.contracts import Prepared, TokenRecord
from pacs_megatron.objectives.registry import REGISTRY, ObjectiveOptions, build_objective
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.objectives.shared.groups import build_table
from tests.support.policies.objective_reference import (
    Batch,
    objective_gradient,
    objective_scores,
    random_batch,
)

SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "pacs": (1, {"name": "pacs"}),
    "pacs-updates": (2, {"name": "pacs"}),
    "pacs-frozen": (
        1,
        {"name": "pacs", "reference": "frozen", "score": "grpo", "score_std_floor": 0.1},
    ),
    "pacs-mean": (1, {"name": "pacs", "reward_proxy": "mean_log_prob"}),
    "grpo": (1, {"name": "grpo"}),
    "grpo-kl": (2, {"name": "grpo", "kl_coef": 0.1}),
    "sft": (1, {"name": "sft"}),
    "dapo": (2, {"name": "dapo", "overlong_length": 8, "overlong_buffer": 4}),
    "dr_grpo": (2, {"name": "dr_grpo", "constant_length": 8}),
    "gspo": (2, {"name": "gspo", "kl_coef": 0.1}),
    "luspo": (2, {"name": "luspo"}),
    "cispo": (2, {"name": "cispo"}),
    "reinforce_pp": (2, {"name": "reinforce_pp"}),
    "rloo": (2, {"name": "rloo"}),
    "w_reinforce": (2, {"name": "w_reinforce", "classes": "negative"}),
    "maxrl": (2, {"name": "maxrl"}),
    "dgpo": (2, {"name": "dgpo"}),
    "distill": (2, {"name": "distill", "teacher": "teacher", "label_coef": 0.5}),
    "steer": (2, {"name": "steer"}),
    "vimpo": (2, {"name": "vimpo", "actor_coef": 1.0}),
    "ucas": (2, {"name": "ucas"}),
    "ppo": (2, {"name": "ppo"}),
    "real": (2, {"name": "real"}),
    "real_bce": (2, {"name": "real_bce"}),
}


def test_every_objective_has_a_setting() -> None:
    assert {options["name"] for _, options in SETTINGS.values()} == set(REGISTRY)


def build(setting: str) -> tuple[Objective, int]:
    updates, options = SETTINGS[setting]
    resolved = TypeAdapter(ObjectiveOptions).validate_python(options)
    return build_objective(resolved, updates_per_step=updates), updates


def prepared_updates(objective: Objective, updates: int, batch: Batch) -> list[Prepared]:
    step_inputs = objective.prepare_step(batch.facts)
    prepared = []
    for update in range(updates):
        needs_scores = "score" in objective.statistics(update)
        scores = objective_scores(objective, batch) if needs_scores else None
        prepared.append(objective.prepare(scores, batch.facts, step_inputs))
    return prepared


@pytest.mark.parametrize("setting", SETTINGS)
def test_promises(setting: str) -> None:
    objective, updates = build(setting)
    batch = random_batch(8)
    n = batch.facts.num_samples
    assert isinstance(objective, Objective)
    assert objective.name == SETTINGS[setting][1]["name"]
    for index, prepared in enumerate(prepared_updates(objective, updates, batch)):
        passes = objective.logprob_passes(index)
        assert passes <= {"step_start", "reference", "value"}
        assert prepared.per_sample
        for values in prepared.per_sample.values():
            assert values.dtype == torch.float64
            assert values.shape == (n,)
            assert not values.requires_grad
            assert torch.isfinite(values).all()
        assert all(np.isfinite(value) for value in prepared.metrics.values())
        record = batch.record(logprobs=batch.logprobs.float())
        # Nothing else may be needed: declared passes, and at the first update its own log-probs as
        # those of the step's start.
        record.step_start_logprobs = record.logprobs.detach() if index == 0 else None
        record.reference_logprobs = None
        if "step_start" in passes:
            record.step_start_logprobs = batch.reference.float()
        if "reference" in passes:
            record.reference_logprobs = batch.reference.float()
        loss = objective.token_loss(record, prepared)
        assert loss.dtype == torch.float32
        assert loss.shape == record.mask.shape

        names = set(objective.token_metrics(record, prepared))
        few = batch.record(torch.arange(3))
        metrics = objective.token_metrics(few, prepared)
        assert set(metrics) == names
        assert all(values.shape == (3,) for values in metrics.values())


@pytest.mark.parametrize("setting", SETTINGS)
def test_any_cut_gives_the_same_sum_and_zero_gradient_samples_may_stay_out(setting: str) -> None:
    objective, updates = build(setting)
    batch = random_batch(9)
    for prepared in prepared_updates(objective, updates, batch):
        whole, loss = objective_gradient(objective, batch, prepared, cuts=1)
        cut, cut_loss = objective_gradient(objective, batch, prepared, cuts=11, seed=1)
        assert cut_loss == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(cut, whole, rtol=1e-13, atol=0)
        assert float(whole.abs().max()) > 0
        if prepared.zero_gradient is None:
            continue
        assert prepared.zero_gradient.dtype == torch.bool
        assert prepared.zero_gradient.shape == (batch.facts.num_samples,)
        left_out = prepared.zero_gradient[batch.sample_of_token]
        assert (whole[left_out] == 0).all()
        record = batch.record(torch.nonzero(left_out)[:, 0])
        assert (objective.token_loss(record, prepared) == 0).all()
        for values in objective.token_metrics(record, prepared).values():
            assert (values == 0).all()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_token_depends_on_no_other_tokens_logprob(setting: str) -> None:
    """The output layer computes gradients chunk by chunk, so a part of a micro-batch has the
    whole's derivative.
    """
    objective, updates = build(setting)
    batch = random_batch(8)
    prepared = prepared_updates(objective, updates, batch)[-1]
    logprobs = batch.logprobs.float().detach().requires_grad_(True)
    record = batch.record(logprobs=logprobs)
    if record.step_start_logprobs is None:
        record = replace(record, step_start_logprobs=logprobs.detach())
    (whole,) = torch.autograd.grad(objective.token_loss(record, prepared).sum(), logprobs)
    for part in (slice(0, 5), slice(5, None)):
        leaf = logprobs.detach()[part].requires_grad_(True)
        alone = replace(part_of(record, part), logprobs=leaf)
        (derivative,) = torch.autograd.grad(objective.token_loss(alone, prepared).sum(), leaf)
        torch.testing.assert_close(derivative, whole[part], rtol=0, atol=0)


def part_of(record: TokenRecord, part: slice) -> TokenRecord:
    """Some of the tokens."""
    changes: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor) and field.name != "response_lens":
            changes[field.name] = value[part]
    changes["estimates"] = {name: values[part] for name, values in record.estimates.items()}
    return replace(record, **changes)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_padding_micro_batch_may_be_coupled(setting: str) -> None:
    """It has a table without samples where all real ones have their groups whole."""
    objective, updates = build(setting)
    facts = random_batch(10).facts
    known = objective.known(facts, objective.prepare_step(facts))
    names = objective.statistics(updates - 1)
    if not names:
        return
    table = build_table(facts, np.empty(0, dtype=np.int64))
    empty = torch.zeros(0, dtype=torch.float64)
    none = {name: values[table.rows] for name, values in known.items()}
    coupled = objective.couple(
        table,
        empty if "score" in names else None,
        empty if "sampler_ratio" in names else None,
        none,
    )
    assert all(len(values) == 0 for values in coupled.values())


def test_an_empty_micro_batch_is_fine() -> None:
    """A padding micro-batch has no tokens; its sum is 0 and still carries a graph."""
    for setting in SETTINGS:
        objective, updates = build(setting)
        batch = random_batch(10)
        for prepared in prepared_updates(objective, updates, batch):
            logprobs = batch.logprobs.clone().requires_grad_(True)
            record = batch.record(torch.zeros(0, dtype=torch.int64), logprobs)
            loss = (objective.token_loss(record, prepared) * record.mask).sum()
            loss.backward()
            assert float(loss.detach()) == 0.0
            assert logprobs.grad is not None
            assert (logprobs.grad == 0).all()
            with torch.no_grad():
                metrics = objective.token_metrics(record, prepared)
            assert all(float(values.sum()) == 0.0 for values in metrics.values())
