"""REAL, PSR, NSR, W-REINFORCE, REINFORCE++, MaxRL, DGPO, STEER, VIMPO, UCAS and DARS equal their
authors' code on the same tensors (make_authors_golden.py made the file). OpenRLHF takes mean and
variance in float32, REAL's BCE variant its targets, STEER all.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from pacs_megatron.config.schema import ResampleOptions
from pacs_megatron.contracts import MiniBatch, TokenBuffers
from pacs_megatron.objectives.registry import ObjectiveOptions, build_objective
from pacs_megatron.objectives.ucas import Ucas, UcasOptions
from pacs_megatron.objectives.vimpo import Vimpo, VimpoOptions
from pacs_megatron.rollout.resampling import num_extra_samples
from tests.support.policies.objective_reference import make_facts, make_record

GOLDEN = json.loads(Path(__file__).with_name("authors_golden.json").read_text(encoding="utf-8"))
OPTIONS: dict[str, dict[str, Any]] = {
    "real": {"name": "real"},
    "real_bce": {"name": "real_bce"},
    "psr": {"name": "w_reinforce", "classes": "positive"},
    "nsr": {"name": "w_reinforce", "classes": "negative"},
    "w_reinforce": {"name": "w_reinforce"},
    "reinforce_pp": {"name": "reinforce_pp"},
    "reinforce_pp-group": {"name": "reinforce_pp", "baseline": "group"},
    "steer": {"name": "steer"},
    "steer-bounded": {"name": "steer", "ratio_max": 1.3},
}
VIMPO = {
    "vimpo": VimpoOptions(name="vimpo", beta=0.2, actor_coef=0.3),
    "vimpo-k2": VimpoOptions(name="vimpo", beta=0.2, actor_coef=0.3, value_kl="k2", lam=0.9),
}
ADVANTAGES: dict[str, dict[str, Any]] = {
    "maxrl": {"name": "maxrl"},
    "dgpo": {"name": "dgpo"},
    "dgpo-unweighted": {"name": "dgpo", "difficulty_temperature": None},
}


def test_every_case_of_the_file_is_compared() -> None:
    assert set(OPTIONS) | set(ADVANTAGES) | set(VIMPO) | {"ucas"} == set(GOLDEN["cases"])


@pytest.mark.parametrize("case", OPTIONS)
def test_loss_and_gradient_of_the_authors(case: str) -> None:
    expected = GOLDEN["cases"][case]
    lens = GOLDEN["lens"]
    tokens = {
        name: torch.tensor(values, dtype=torch.float64) for name, values in GOLDEN["tokens"].items()
    }
    objective = build_objective(
        TypeAdapter(ObjectiveOptions).validate_python(OPTIONS[case]), updates_per_step=2
    )
    facts = make_facts(GOLDEN["groups"], GOLDEN["labels"], lens=lens)
    logps = tokens["logps"].requires_grad_(True)
    record = make_record(
        logps,
        lens,
        step_start_logprobs=tokens["old"],
        entropy=tokens["entropy"],
    )
    differences = (tokens["logps"] - tokens["old"]).detach()
    scores = torch.stack([piece.mean() for piece in differences.split(lens)])
    if objective.score_is_maximum:
        of_tokens = objective.token_scores(replace(record, logprobs=logps.detach()))
        scores = torch.stack([piece.max() for piece in of_tokens.split(lens)])
    prepared = objective.prepare(scores, facts, objective.prepare_step(facts))
    loss = objective.token_loss(record, prepared).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    relative = 2e-6 if case.startswith(("reinforce_pp", "real_bce", "steer")) else 1e-12
    if prepared.loss is not None:  # REAL's token loss is a surrogate
        loss = torch.tensor(prepared.loss, dtype=torch.float64)
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=relative)
    smallest = 1e-8 if case.startswith("steer") else 1e-15
    np.testing.assert_allclose(logps.grad, expected["gradient"], rtol=relative, atol=smallest)


@pytest.mark.parametrize("case", VIMPO)
def test_vimpo_of_the_authors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advantages of a step's start, and the loss of its first update."""
    from pacs_megatron.policy import estimates

    objective = Vimpo(VIMPO[case])
    expected = GOLDEN["cases"][case]
    lens = GOLDEN["lens"]
    start = torch.tensor(GOLDEN["tokens"]["logps"], dtype=torch.float64)
    reference = torch.tensor(GOLDEN["tokens"]["old"], dtype=torch.float64)
    offsets = np.cumsum([0, *lens])
    tokens = TokenBuffers(
        index=np.arange(len(lens)),
        token_ids=np.zeros(offsets[-1], np.int32),
        offsets=offsets,
        writers=np.full(offsets[-1], 1, np.uint8),
        sampler_logprobs=np.zeros(offsets[-1], np.float32),
        response_offsets=offsets,
    )
    minibatch = MiniBatch(
        facts=make_facts(GOLDEN["groups"], GOLDEN["labels"], lens=lens),
        rows=np.arange(len(lens)),
        tokens=tokens,
        plan=cast("Any", None),
        step_start_logprobs=start,
        reference_logprobs=reference,
    )
    alone = SimpleNamespace(by_sample=lambda _facts, _parts, own: np.array(own[0]))
    # Not rounded to float32.
    monkeypatch.setattr(
        estimates, "_column", lambda _, by_sample: torch.from_numpy(np.concatenate(by_sample))
    )
    facts, [found] = estimates.with_estimates(
        cast("Any", alone), minibatch.facts, [minibatch], objective
    )
    advantages = found.estimates["advantage"]
    np.testing.assert_allclose(advantages.numpy(), expected["estimates"], rtol=1e-6)

    logps = start.clone().requires_grad_(True)
    record = make_record(
        logps,
        lens,
        step_start_logprobs=start,
        reference_logprobs=reference,
        estimates={"advantage": torch.tensor(expected["estimates"], dtype=torch.float64)},
    )
    scores = torch.stack([piece.sum() for piece in objective.token_scores(record).split(lens)])
    prepared = objective.prepare(scores.detach(), facts, objective.prepare_step(facts))
    loss = objective.token_loss(record, prepared).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-12)
    np.testing.assert_allclose(logps.grad, expected["gradient"], rtol=1e-12, atol=1e-15)


def test_further_samples_of_dars() -> None:
    for num_correct, num_samples, schedule, by_std, expected in GOLDEN["dars"]:
        options = ResampleOptions(schedule=schedule, by_std=by_std)
        accuracy = num_correct / num_samples
        assert num_extra_samples(accuracy, num_samples, options) == expected, (accuracy, schedule)


def test_ucas_of_the_authors() -> None:
    """They take mean and deviation in float32."""
    lens = GOLDEN["lens"]
    certainty = torch.tensor(GOLDEN["tokens"]["old"], dtype=torch.float64)
    logit = torch.tensor(GOLDEN["tokens"]["entropy"], dtype=torch.float64)
    facts = replace(
        make_facts(GOLDEN["groups"], GOLDEN["labels"], lens=lens),
        certainty=np.array([float(piece.sum()) for piece in certainty.split(lens)]),
        logit_min=np.array([float(piece.min()) for piece in logit.split(lens)]),
        logit_max=np.array([float(piece.max()) for piece in logit.split(lens)]),
    )
    objective = build_objective(UcasOptions(name="ucas"), updates_per_step=1)
    assert isinstance(objective, Ucas)
    prepared = objective.prepare(None, facts, objective.prepare_step(facts))
    record = make_record(logit, lens, estimates={"logit": logit})
    np.testing.assert_allclose(
        objective.token_advantage(record, prepared),
        GOLDEN["cases"]["ucas"]["advantages"],
        rtol=2e-6,
        atol=1e-7,
    )


@pytest.mark.parametrize("case", ADVANTAGES)
def test_advantages_of_the_authors(case: str) -> None:
    objective = build_objective(
        TypeAdapter(ObjectiveOptions).validate_python(ADVANTAGES[case]), updates_per_step=1
    )
    facts = make_facts(GOLDEN["groups"], GOLDEN["labels"], lens=GOLDEN["lens"])
    prepared = objective.prepare(None, facts, objective.prepare_step(facts))
    of_tokens = np.repeat(prepared.per_sample["advantage"].numpy(), GOLDEN["lens"])
    np.testing.assert_allclose(of_tokens, GOLDEN["cases"][case]["advantages"], rtol=1e-6)
