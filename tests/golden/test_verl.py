"""GAE, whitening, losses and group advantages of verl 0.5.0 on the same tensors
(tests/golden/make_verl_golden.py made the file). verl divides by a count plus 1e-8.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from pacs_megatron.contracts import MiniBatch, TokenBuffers, TokenRecord
from pacs_megatron.objectives.ppo import Ppo, PpoOptions
from pacs_megatron.objectives.registry import ObjectiveOptions, build_objective
from tests.support.policies.objective_reference import make_facts, make_record

GOLDEN = json.loads(Path(__file__).with_name("verl_golden.json").read_text(encoding="utf-8"))
TOKENS = {
    name: torch.tensor(values, dtype=torch.float64) for name, values in GOLDEN["tokens"].items()
}
LENS = GOLDEN["lens"]
FACTS = make_facts(GOLDEN["groups"], [1.0, 0.0] * 3, lens=LENS)


def record(logprobs: torch.Tensor, **estimates: Any) -> TokenRecord:
    tokens = {
        name: torch.as_tensor(values, dtype=torch.float64) for name, values in estimates.items()
    }
    return make_record(logprobs, LENS, step_start_logprobs=TOKENS["old"], estimates=tokens)


def test_advantages_are_whitened_and_returns_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's tensors have a reward at each token: the KL term gives them here."""
    from pacs_megatron.policy import estimates

    objective = Ppo(
        PpoOptions(name="ppo", kl_coef=1.0, kl_in="reward", kl_estimator="k1", **GOLDEN["options"])
    )
    offsets = np.cumsum([0, *LENS])
    samples = np.arange(len(LENS))
    tokens = TokenBuffers(
        index=samples,
        token_ids=np.zeros(offsets[-1], np.int32),
        offsets=offsets,
        writers=np.full(offsets[-1], 1, np.uint8),
        sampler_logprobs=np.zeros(offsets[-1], np.float32),
        response_offsets=offsets,
    )
    minibatch = MiniBatch(
        facts=FACTS.select(samples),
        rows=samples,
        tokens=tokens,
        plan=cast("Any", None),
        step_start_logprobs=-TOKENS["rewards"],
        reference_logprobs=torch.zeros_like(TOKENS["rewards"]),
        estimates={"value": TOKENS["values"]},
    )
    minibatch.facts.rewards[:] = 0.0
    alone = SimpleNamespace(by_sample=lambda _facts, _parts, own: np.array(own[0]))
    # Not rounded to float32.
    monkeypatch.setattr(
        estimates, "_column", lambda _, by_sample: torch.from_numpy(np.concatenate(by_sample))
    )
    facts, [found] = estimates.with_estimates(
        cast("Any", alone), minibatch.facts, [minibatch], objective
    )
    for name, expected in (("advantage", GOLDEN["advantages"]), ("return", GOLDEN["returns"])):
        np.testing.assert_allclose(found.estimates[name].numpy(), expected, rtol=1e-7, atol=1e-9)
    pieces = torch.tensor(GOLDEN["advantages"]).split(LENS)
    np.testing.assert_allclose(
        facts.advantage_abs, [float(piece.abs().mean()) for piece in pieces], rtol=1e-5
    )


def test_losses_and_gradients() -> None:
    objective = Ppo(PpoOptions(name="ppo", **GOLDEN["options"]))
    for name, tokens, own, estimates in (
        (
            "value",
            TOKENS["new_values"],
            objective.critic,
            {"value": TOKENS["values"], "return": GOLDEN["returns"]},
        ),
        ("policy", TOKENS["logps"], objective, {"advantage": GOLDEN["advantages"]}),
    ):
        leaf = tokens.clone().requires_grad_(True)
        one = record(leaf, **estimates)
        prepared = own.prepare(None, FACTS, {"advantage": np.ones(len(LENS))})
        loss = own.token_loss(one, prepared).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert float(loss.detach()) == pytest.approx(GOLDEN[f"{name}_loss"], rel=1e-7)
        np.testing.assert_allclose(leaf.grad, GOLDEN[f"{name}_gradient"], rtol=1e-7, atol=1e-12)
        clipped = own.token_metrics(one, prepared)[
            "critic/clip_frac" if name == "value" else "ppo/clip_frac"
        ]
        assert (
            float(clipped.sum()) == pytest.approx(GOLDEN[f"{name}_clip_frac"], rel=1e-6)
            and clipped.sum() > 0
        )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"name": "grpo"}, "compute_grpo_outcome_advantage"),
        ({"name": "dr_grpo", "constant_length": 5}, "dr_grpo"),
        ({"name": "rloo"}, "compute_rloo_outcome_advantage"),
    ],
)
def test_group_advantages(options: dict[str, Any], name: str) -> None:
    objective = build_objective(
        TypeAdapter(ObjectiveOptions).validate_python(options), updates_per_step=1
    )
    rewards = [float(piece.sum()) for piece in TOKENS["rewards"].split(LENS)]
    found = objective.prepare_step(
        make_facts(GOLDEN["groups"], [1.0, 0.0] * 3, lens=LENS, rewards=rewards)
    )
    np.testing.assert_allclose(found["advantage"], GOLDEN["group_advantages"][name], rtol=1e-6)
