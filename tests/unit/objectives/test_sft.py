"""SFT against the negative log-likelihood of the reference."""

from typing import Literal

import numpy as np
import pytest

from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.objectives.sft import SftOptions
from pacs_megatron.objectives.shared.base import Objective
from tests.support.policies.objective_reference import (
    flat_reference_loss,
    make_facts,
    objective_gradient,
    random_batch,
)


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
def test_loss_and_gradient_match_autograd(loss_mean: Literal["token", "sequence"]) -> None:
    batch = random_batch(2)
    objective = build_objective(SftOptions(name="sft", loss_mean=loss_mean), updates_per_step=1)
    prepared = objective.prepare(None, batch.facts, objective.prepare_step(batch.facts))
    gradient, loss = objective_gradient(objective, batch, prepared, cuts=4)
    logprobs = batch.logprobs.clone().requires_grad_(True)
    plain, _ = flat_reference_loss({"name": "sft", "loss_mean": loss_mean}, batch, logprobs)
    plain.backward()
    assert prepared.loss is None and loss == pytest.approx(float(plain.detach()), rel=1e-12)
    np.testing.assert_allclose(gradient, logprobs.grad, rtol=1e-12, atol=0)


def test_groups_of_one_and_no_passes() -> None:
    objective = build_objective(SftOptions(name="sft"), updates_per_step=1)
    assert isinstance(objective, Objective)
    assert not objective.logprob_passes(0) and not objective.statistics(0)
    facts = make_facts([0, 1, 2], [1.0, 1.0, 1.0], lens=[1, 2, 3])
    prepared = objective.prepare(None, facts, objective.prepare_step(facts))
    assert prepared.per_sample["token_weight"].tolist() == pytest.approx([1 / 6] * 3)
    assert objective.token_metrics(random_batch(0).record(), prepared) == {}
    with pytest.raises(ValueError, match="has no scores"):
        objective.token_scores(random_batch(0).record())
