"""FP8 recipes through the whole policy; products are emulated: quantisation only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import run_ranks
from tests.te.cases import CASES, DISCARDED, STEPS, TOKENS, Outcome, model_of, run, weights_of
from tests.te.fp8_cases import fp8_options

ALL = []
for _name in CASES:
    ALL += [(recipe, _name) for recipe in (None, "tensorwise", "blockwise")]
    if _name not in DISCARDED:
        ALL.append(("delayed", _name))
PAIRWISE = {
    ("tensorwise", "qwen3-tp2-sp-distopt"),
    ("blockwise", "moe-tp2-sp"),
    ("delayed", "qwen3-recompute-full"),
}


_bf16: dict[str, Outcome] = {}


def in_bf16(name: str, folder: Path) -> Outcome:
    """The outcome of a case, computed once."""
    if name not in _bf16:
        _bf16[name] = run(name, folder, dtype="bf16")
    return _bf16[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


@pytest.mark.parametrize(
    ("recipe", "name"),
    [pytest.param(*both, marks=[] if both in PAIRWISE else [pytest.mark.campaign]) for both in ALL],
)
@pytest.mark.timeout(900)
def test_three_updates_and_a_resume(recipe: str | None, name: str, folder: Path) -> None:
    """FP8 stays near bf16, is not bf16, and a resume gives the same bits:

    FP8 state is in the checkpoint.
    """
    plain = in_bf16(name, folder)
    assert plain.resumed_equal
    if recipe is None:
        return
    outcome = run(name, folder, dtype="bf16", **fp8_options(recipe))
    difference = [np.abs(outcome.before[row] - plain.before[row]).mean() for row in outcome.before]
    # With experts a quantised product also selects other experts for some tokens.
    assert 0 < np.mean(difference) < (0.5 if name.startswith("moe") else 0.3)
    np.testing.assert_allclose(outcome.norms, plain.norms, rtol=0.5)
    assert outcome.resumed_equal


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed"])
def test_a_score_pass_changes_no_fp8_state_and_scores_are_zero(recipe: str, folder: Path) -> None:
    """At unchanged weights a second pass gives the same log-probs, and scales and histories are
    what they were.
    """
    case = CASES["qwen3-one"]
    model = model_of(case, folder)

    def on_rank(_rank: int, world: int) -> tuple[float, bool]:
        from pacs_megatron.objectives.pacs import PacsOptions
        from pacs_megatron.objectives.registry import build_objective
        from tests.support.policies.policy_cases import make_part, make_policy, train

        policy = make_policy(
            model, world, tokens_per_microbatch=TOKENS, dtype="bf16", **fp8_options(recipe)
        )
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        train(policy, objective, STEPS[:1], tokens_per_microbatch=TOKENS)
        states = fp8_states(policy)
        minibatch = make_part(*STEPS[1], policy, TOKENS)
        first = policy.logprobs(minibatch, "step_start")
        second = policy.logprobs(minibatch, "step_start")
        largest = float((first - second).abs().max())
        same = all(torch.equal(a, b) for a, b in zip(states, fp8_states(policy), strict=True))
        return largest, same

    assert run_ranks(on_rank, 1, timeout=300)[0] == (0.0, True)


def fp8_states(policy: Any) -> list[torch.Tensor]:
    """Scales and amax histories of delayed scaling; empty for recipes without state."""
    found = []
    for model in policy.models:
        for module in model.modules():
            for key in ("scaling_fwd", "scaling_bwd"):
                state = getattr(module, "fp8_meta", {}).get(key)
                for name in ("scale", "amax_history"):
                    if torch.is_tensor(getattr(state, name, None)):
                        found.append(getattr(state, name).clone())
    return found


def test_first_and_last_layers_in_bf16(folder: Path) -> None:
    """`first_last_layers_bf16:

    1` on two layers leaves nothing in FP8: the outcome is bf16's, bit for bit.
    """
    options = fp8_options("blockwise")["fp8"] | {"first_last_layers_bf16": 1}
    outcome = run("qwen3-one", folder, dtype="bf16", fp8=options)
    plain = in_bf16("qwen3-one", folder)
    assert all(np.array_equal(outcome.weights[name], plain.weights[name]) for name in plain.weights)


def test_weights_round_trip_through_an_export(folder: Path) -> None:
    """An export that is loaded into a new FP8 policy is exported again with the same bits."""
    model = model_of(CASES["qwen3-one"], folder)

    def on_rank(_rank: int, world: int) -> bool:
        from tests.support.policies.policy_cases import make_policy

        policy = make_policy(model, world, dtype="bf16", **fp8_options("tensorwise"))
        first = {name: tensor.clone() for name, tensor in policy.export_weights()}
        policy.load_weights(lambda name: first[name])
        again = weights_of(policy)
        return all(np.array_equal(again[name], first[name].float().numpy()) for name in first)

    assert run_ranks(on_rank, 1)[0]
