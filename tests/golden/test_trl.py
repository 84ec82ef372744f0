"""The losses and gradients of TRL 1.16 on the same tensors (tests/golden/make_trl_golden.py made
the file).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from pacs_megatron.objectives.registry import ObjectiveOptions, build_objective
from tests.support.policies.objective_reference import make_facts, make_record

GOLDEN = json.loads(Path(__file__).with_name("trl_golden.json").read_text(encoding="utf-8"))
TRUNCATE = {"importance": "truncate", "importance_cap": GOLDEN["cap"]}
MASK = {"importance": "mask", "importance_cap": GOLDEN["cap"], "importance_floor": GOLDEN["floor"]}
OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "loss_mean": "sequence", "clip_low": 0.1, "clip_high": 0.1},
    "grpo-kl": {
        "name": "grpo",
        "loss_mean": "sequence",
        "clip_low": 0.1,
        "clip_high": 0.1,
        "kl_coef": 0.3,
    },
    "grpo-token-mean-entropy": {
        "name": "grpo",
        "clip_low": 0.1,
        "clip_high": 0.1,
        "entropy_coef": 0.2,
    },
    "dapo": {"name": "dapo"},
    "dr_grpo": {
        "name": "dr_grpo",
        "clip_low": 0.1,
        "clip_high": 0.1,
        "constant_length": GOLDEN["constant_length"],
    },
    "cispo": {"name": "cispo", "clip_high": 0.1},
    "gspo": {"name": "gspo", "clip_low": 0.03, "clip_high": 0.04},
    "luspo": {"name": "luspo", "clip_low": 0.03, "clip_high": 0.04},
    "luspo-kl": {"name": "luspo", "clip_low": 0.03, "clip_high": 0.04, "kl_coef": 0.2},
    "dapo-truncate-token": {"name": "dapo", **TRUNCATE},
    "dapo-mask-sequence": {"name": "dapo", **MASK, "importance_level": "sequence"},
    "gspo-truncate-sequence": {
        "name": "gspo",
        "clip_low": 0.03,
        "clip_high": 0.04,
        **TRUNCATE,
        "importance_level": "sequence",
    },
    "rloo": {"name": "rloo"},
}


def test_every_case_of_the_file_is_compared() -> None:
    assert set(OPTIONS) == set(GOLDEN["cases"])


@pytest.mark.parametrize("case", OPTIONS)
def test_loss_and_gradient_of_trl(case: str) -> None:
    expected = GOLDEN["cases"][case]
    lens = GOLDEN["lens"]
    tokens = {
        name: torch.tensor(values, dtype=torch.float64) for name, values in GOLDEN["tokens"].items()
    }
    objective = build_objective(
        TypeAdapter(ObjectiveOptions).validate_python(OPTIONS[case]), updates_per_step=2
    )
    pieces = {name: values.split(lens) for name, values in tokens.items()}
    ratios = [float((a - b).mean()) for a, b in zip(pieces["old"], pieces["sampler"], strict=True)]
    facts = make_facts([0, 0, 0, 1, 1, 1], [1.0, 0.0] * 3, lens=lens, log_ratio_to_sampler=ratios)
    scores = torch.stack(
        [(a - b).sum() for a, b in zip(pieces["logps"], pieces["old"], strict=True)]
    )
    prepared = objective.prepare(scores, facts, {"advantage": np.array(GOLDEN["advantages"])})
    logps = tokens["logps"].requires_grad_(True)
    entropies = tokens["entropies"].requires_grad_(True)
    record = make_record(
        logps,
        lens,
        step_start_logprobs=tokens["old"],
        reference_logprobs=tokens["reference"],
        sampler_logprobs=tokens["sampler"],
        entropy=entropies,
    )
    loss = objective.token_loss(record, prepared).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-9)
    np.testing.assert_allclose(logps.grad, expected["gradient"], rtol=1e-9, atol=1e-15)
    assert ("entropy_gradient" in expected) == (entropies.grad is not None)
    if entropies.grad is not None:
        np.testing.assert_allclose(entropies.grad, expected["entropy_gradient"], rtol=1e-12)


def test_punishment_of_long_responses_of_trl() -> None:
    """DAPO's equation 13, in units of the largest punishment."""
    given = GOLDEN["overlong"]
    size = len(given["lens"])
    expected = np.array(given["punishment"])
    options = {
        "name": "dapo",
        "overlong_length": given["length"],
        "overlong_buffer": given["buffer"],
    }
    for penalty in (1.0, 0.5):
        objective: Any = build_objective(
            TypeAdapter(ObjectiveOptions).validate_python(options | {"overlong_penalty": penalty}),
            updates_per_step=1,
        )
        facts = make_facts([0] * size, [1.0, 0.0] * (size // 2), lens=given["lens"])
        found = objective.rewards(facts) - facts.rewards
        np.testing.assert_allclose(found, penalty * expected, rtol=1e-15, atol=1e-16)
    assert set(expected) > {0.0, -1.0}
