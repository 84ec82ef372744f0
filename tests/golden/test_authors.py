"""REAL, PSR, NSR, W-REINFORCE, REINFORCE++, MaxRL, DGPO and STEER equal their authors' code on the
same tensors (make_authors_golden.py made the file). OpenRLHF takes mean and variance in float32,
REAL's BCE variant its targets, STEER all.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from pacs_megatron.objectives.registry import ObjectiveOptions, build_objective
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
ADVANTAGES: dict[str, dict[str, Any]] = {
    "maxrl": {"name": "maxrl"},
    "dgpo": {"name": "dgpo"},
    "dgpo-unweighted": {"name": "dgpo", "difficulty_temperature": None},
}


def test_every_case_of_the_file_is_compared() -> None:
    assert set(OPTIONS) | set(ADVANTAGES) == set(GOLDEN["cases"])


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


@pytest.mark.parametrize("case", ADVANTAGES)
def test_advantages_of_the_authors(case: str) -> None:
    objective = build_objective(
        TypeAdapter(ObjectiveOptions).validate_python(ADVANTAGES[case]), updates_per_step=1
    )
    facts = make_facts(GOLDEN["groups"], GOLDEN["labels"], lens=GOLDEN["lens"])
    prepared = objective.prepare(None, facts, objective.prepare_step(facts))
    of_tokens = np.repeat(prepared.per_sample["advantage"].numpy(), GOLDEN["lens"])
    np.testing.assert_allclose(of_tokens, GOLDEN["cases"][case]["advantages"], rtol=1e-6)
