"""The CUDA branch (Transformer Engine's layers and FusedAdam) against the local layers, in fp32:
three updates, resume.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.policies.plain_trainer import PlainTrainer, pacs_loss
from tests.support.policies.policy_cases import CLIP_GRAD
from tests.te.cases import CASES, DISCARDED, STEPS, Outcome, model_of, run
from tests.te.stand_ins import CALLS

PAIRWISE = [
    "qwen3-one",
    "qwen3-tp2-sp-distopt",
    "qwen3-tied-pp2",
    "qwen2-tp2-sp",
    "moe-ep2-distopt",
    "moe-tp2-ep2-sp",
    "moe-tp2-ep2-sp-distopt",
    *DISCARDED,
]

TP_WITH_EP = ["moe-tp2-ep2-sp", "moe-tp2-ep2-sp-distopt"]
_outcomes: dict[str, Outcome] = {}


def outcome_of(name: str, folder: Path) -> Outcome:
    """The outcome of a case, computed once."""
    if name not in _outcomes:
        _outcomes[name] = run(name, folder)
    return _outcomes[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("te")


@pytest.fixture(scope="module")
def local(folder: Path, request: pytest.FixtureRequest) -> Path:
    """Outcomes of the local layers, computed in a process that does not see Transformer Engine's
    stand-ins.
    """
    names = sorted(
        {item.callspec.params["name"] for item in request.session.items if _is_ours(item)}
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.te.local_layers", str(folder), *names],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _is_ours(item: pytest.Item) -> bool:
    return item.name.startswith("test_three_updates") and hasattr(item, "callspec")


@pytest.mark.parametrize(
    "name",
    [
        name if name in PAIRWISE else pytest.param(name, marks=pytest.mark.campaign)
        for name in CASES
    ],
)
@pytest.mark.timeout(900)
def test_three_updates_equal_the_local_layers(name: str, local: Path) -> None:
    outcome = outcome_of(name, local)
    expected = np.load(local / f"{name}.npz")
    for row, values in outcome.before.items():
        np.testing.assert_allclose(
            values, expected[f"before.{row}"], atol=1e-5
        )  # rounding of fp32 near 10 differs between CPUs: 6.2e-6 was seen
    np.testing.assert_allclose(outcome.norms, expected["norms"], rtol=1e-5)
    for weight, values in outcome.weights.items():
        np.testing.assert_allclose(values, expected[f"weights.{weight}"], atol=2e-6, err_msg=weight)
    assert outcome.resumed_equal and bool(expected["resumed"])
    assert set(outcome.optimizers) == {"FusedAdam"}


@pytest.mark.parametrize("name", TP_WITH_EP)
def test_the_norm_with_experts_equals_a_float64_reference(name: str, folder: Path) -> None:
    """With tp and ep each rank has other experts, all of which belong to the norm (Megatron-LM's
    pull request 5916).
    """
    trainer = PlainTrainer(model_of(CASES[name], folder), clip=CLIP_GRAD, dtype=torch.float64)
    norms = []
    for facts, tokens in STEPS:
        starts = trainer.logprobs(facts, tokens)
        _, norm = trainer.update(facts, tokens, pacs_loss(starts, facts))
        norms.append(norm)
    squares = {}
    for parameter_name, parameter in trainer.model.named_parameters():
        squares[parameter_name] = float(parameter.grad.square().sum())
    of_experts = sum(square for key, square in squares.items() if ".experts." in key)
    assert of_experts > 0.05 * sum(squares.values()), "an error in their norm would be visible"

    np.testing.assert_allclose(outcome_of(name, folder).norms, norms, rtol=1e-5)


def test_the_stand_ins_are_transformer_engines_own_modules() -> None:
    import transformer_engine.pytorch as te

    assert te.LayerNormLinear.__module__.startswith("transformer_engine.")
    assert not CALLS, "forwards run in the ranks only, never in the test process"
