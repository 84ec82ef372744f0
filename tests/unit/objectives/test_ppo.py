"""GAE, whitening and the value loss against their definitions; rejected options."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from pacs_megatron.objectives.ppo import Ppo, PpoOptions, gae
from pacs_megatron.objectives.registry import ObjectiveOptions
from pacs_megatron.workbench.certify import formulas
from tests.support.policies.objective_reference import (
    assert_metrics_equal,
    random_batch,
    with_defaults,
)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.97, 0.0)])
def test_gae_is_the_double_sum_of_its_definition(gamma: float, lam: float) -> None:
    rng = np.random.default_rng(0)
    lens = [1, 2, 17, 5]
    rewards, values = ([rng.normal(size=length) for length in lens] for _ in range(2))
    values = [value.astype(np.float32) for value in values]
    found = gae(rewards, values, gamma, lam)
    for advantage, reward, value in zip(found, rewards, values, strict=True):
        of_reference = formulas.gae(
            torch.from_numpy(reward), torch.from_numpy(value).double(), gamma, lam
        )
        np.testing.assert_allclose(advantage, of_reference, rtol=1e-12, atol=1e-12)


def test_gae_of_a_sample_does_not_depend_on_the_others() -> None:
    """A rank has other samples in other layouts: the bits must be the same."""
    rng = np.random.default_rng(1)
    rewards, values = ([rng.normal(size=length) for length in (3, 40, 9)] for _ in range(2))
    together = gae(rewards, values, 0.99, 0.95)
    for row in range(3):
        [alone] = gae(rewards[row : row + 1], values[row : row + 1], 0.99, 0.95)
        np.testing.assert_array_equal(alone, together[row])


def test_with_lambda_1_the_return_is_the_remaining_reward() -> None:
    """No value enters after the last token, also where the response was cut."""
    objective = Ppo(PpoOptions(name="ppo"))
    values = [np.array([0.3, 0.9, 0.1], np.float32), np.array([0.7], np.float32)]
    advantages, returns = objective.estimate([1.0, 0.0], values, [], [])
    for value, advantage, found, reward in zip(
        values, advantages, returns, (1.0, 0.0), strict=True
    ):
        np.testing.assert_allclose(found, reward, atol=1e-7)
        np.testing.assert_allclose(advantage, reward - value, atol=1e-7)


def test_kl_in_the_reward_is_subtracted_token_by_token() -> None:
    objective = Ppo(PpoOptions(name="ppo", lam=0.0, kl_coef=0.5, kl_in="reward", kl_estimator="k1"))
    start = np.array([-1.0, -2.0], np.float32)
    reference = np.array([-1.5, -1.0], np.float32)
    [advantage], _ = objective.estimate([1.0], [np.zeros(2, np.float32)], [start], [reference])
    np.testing.assert_allclose(advantage, [-0.25, 1.5])
    assert (
        objective.logprob_passes(0) == {"value", "step_start", "reference"}
        and not objective.kl_in_reward
    )


@pytest.mark.parametrize("value_clip", [None, 0.1])
def test_value_loss_and_its_gradient(value_clip: float | None) -> None:
    batch = random_batch(3)
    critic = Ppo(PpoOptions(name="ppo", value_clip=value_clip)).critic
    record = batch.record()
    record.logprobs = (
        record.estimates["value"] + torch.linspace(-0.3, 0.3, len(batch.mask))
    ).requires_grad_()
    loss = (critic.token_loss(record, critic.prepare(None, batch.facts, None)) * record.mask).sum()
    (gradient,) = torch.autograd.grad(loss, record.logprobs)

    values = record.logprobs.detach().requires_grad_()
    of_reference, reference_metrics = formulas.value_loss(
        with_defaults({"name": "ppo", "value_clip": value_clip}),
        batch.split(values),
        batch.split(record.estimates["value"]),
        batch.split(record.estimates["return"]),
    )
    of_reference.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(float(of_reference.detach()), rel=1e-12)
    np.testing.assert_allclose(gradient, values.grad, rtol=0, atol=1e-12)

    record.logprobs = record.logprobs.detach()
    metrics = {
        name: float((value * record.mask).sum())
        for name, value in critic.token_metrics(record, None).items()
    }
    clip_frac = {"critic/clip_frac": reference_metrics["critic/clip_frac"]}
    assert_metrics_equal(metrics, clip_frac)
    assert (metrics["critic/clip_frac"] > 0) == (value_clip is not None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "grpo", "critic": {"lr": 1e-5}}, "Extra inputs"),
        ({"name": "dapo", "lam": 0.95}, "Extra inputs"),
        (
            {"name": "ppo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k3"},
            "does not go with objective.name=ppo",
        ),
        ({"name": "ppo", "critic": {"warmup_steps": -1}}, "greater than or equal to 0"),
        ({"name": "ppo", "lam": 1.1}, "less than or equal to 1"),
        ({"name": "ppo", "value_clip": 0.0}, "greater than 0"),
    ],
)
def test_rejected(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TypeAdapter(ObjectiveOptions).validate_python(options)
