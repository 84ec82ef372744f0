"""Every other objective on the real policy: three updates of one step in any layout equal the plain
loop.

With a KL term or a teacher a step of one update comes first: else the frozen reference would be the
step's start, and the KL 0. The teacher of `distill` is the initial policy.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from pacs_megatron.contracts import TokenBuffers
from pacs_megatron.objectives.registry import ObjectiveOptions, build_objective
from tests.support.policies.objective_cases import OBJECTIVE_CASES
from tests.support.policies.plain_trainer import Logps, PlainTrainer, loss_of
from tests.support.policies.policy_cases import make_part, make_policy, random_step, with_passes
from tests.support.ranks import run_ranks
from tests.support.tiny_families import make_family

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"cp": 2}),
    "optimizer2": (2, {"distributed_optimizer": True}),
    "ep2": (2, {"ep": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
}
STEPS = [random_step(seed) for seed in (21, 22, 23)]
BUDGETS = {"together": 96, "apart": 32}
"""Tokens. Groups have 16 to 82 tokens; with the smaller budget most are apart."""
CHEAP = {("gspo-wide", "dp2", "apart"), ("rloo-mask", "cp2", "apart"), ("real", "one", "together")}


def cases() -> list[Any]:
    """Every objective in every layout, with groups together or apart in turn; the remaining ones in
    the campaign.
    """
    found = []
    for at, case in enumerate(OBJECTIVE_CASES):
        for offset, layout in enumerate(LAYOUTS):
            for groups in BUDGETS:
                in_turn = (at + offset) % 2 == list(BUDGETS).index(groups)
                is_cheap = (case, layout, groups) in CHEAP
                marks = []
                if not is_cheap:
                    marks = [pytest.mark.full if in_turn else pytest.mark.campaign]
                found.append(pytest.param(case, layout, groups, marks=marks))
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shape = {"vocab_size": 272, "num_hidden_layers": 4}
    return {
        family: make_family(tmp_path_factory.mktemp(family), family, **shape)
        for family in ("qwen3", "qwen3_moe")
    }


def per_sample(values: np.ndarray, tokens: TokenBuffers) -> Logps:
    return [torch.from_numpy(piece) for piece in np.split(values, tokens.response_offsets[1:-1])]


def sampled(trainer: PlainTrainer, seed: int) -> TokenBuffers:
    """The tokens of STEPS[seed] with log-probs of a sampler near the policy."""
    facts, tokens = STEPS[seed]
    own = np.concatenate([logp.numpy() for logp in trainer.logprobs(facts, tokens)])
    noise = np.random.default_rng(seed).normal(0, 0.2, len(own))
    return replace(tokens, sampler_logprobs=(own + noise).astype(np.float32))


def plain_updates(
    folder: Path, case: str
) -> tuple[list[tuple[float, float]], dict[str, np.ndarray], list[TokenBuffers]]:
    """(loss, norm) of every update by autograd through each whole mini-batch, the weights, the
    tokens.
    """
    trainer = PlainTrainer(folder)
    tokens = [sampled(trainer, seed) for seed in range(3)]
    parts = [(facts, part) for (facts, _), part in zip(STEPS, tokens, strict=True)]
    references = [trainer.logprobs(*part) for part in parts]
    numbers = []
    for updates in steps_of(case):
        starts = [trainer.logprobs(*part) for part in parts]
        for index in updates:
            facts, part = parts[index]
            loss = loss_of(
                OBJECTIVE_CASES[case],
                facts,
                starts=starts[index],
                references=references[index],
                samplers=per_sample(part.sampler_logprobs, part),
            )
            numbers.append(trainer.update(facts, part, loss))
    return numbers, trainer.weights(), tokens


def steps_of(case: str) -> list[range]:
    has_reference = not OBJECTIVE_CASES[case].keys().isdisjoint(("kl_coef", "teacher"))
    return [range(1), range(3)] if has_reference else [range(3)]


@pytest.mark.parametrize(("case", "layout", "groups"), cases())
def test_three_updates_equal_the_plain_loop(
    folders: dict[str, Path], case: str, layout: str, groups: str
) -> None:
    world, parallel = LAYOUTS[layout]
    folder = folders["qwen3_moe" if layout == "ep2" else "qwen3"]
    expected, weights, tokens = plain_updates(folder, case)
    budget = BUDGETS[groups]

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(folder, world, tokens_per_microbatch=budget, **parallel)
        objective = build_objective(
            TypeAdapter(ObjectiveOptions).validate_python(OBJECTIVE_CASES[case]), updates_per_step=3
        )
        if "reference" in objective.logprob_passes(0):
            policy.take_reference(reset_optimizer=False)
        parts = [
            make_part(facts, part, policy, budget, index=index, keep_groups=groups == "together")
            for index, ((facts, _), part) in enumerate(zip(STEPS, tokens, strict=True))
        ]
        reports = []
        for updates in steps_of(case):
            for minibatch in [with_passes(policy, objective, parts[index]) for index in updates]:
                facts = minibatch.facts
                if objective.kl_in_reward:
                    facts = policy.with_sample_kl(facts, [minibatch], objective)
                    assert bool(np.any(facts.kl_to_reference)) == (len(updates) > 1)
                reports.append(policy.update(minibatch, objective, objective.prepare_step(facts)))
        found = [(report.metrics["objective/loss"], report.grad_norm) for report in reports]
        exported = {name: tensor.float().numpy().copy() for name, tensor in policy.export_weights()}
        return (
            found,
            exported,
            policy.num_passes["score"],
            [bool(part.plan.together.all()) for part in parts],
        )

    results = run_ranks(on_rank, world)
    for found, exported, score_passes, together in results:
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
        for name, weight in weights.items():
            np.testing.assert_allclose(exported[name], weight, atol=1e-5, err_msg=name)
        # REAL couples siblings, STEER all samples; a sample lies whole in a micro-batch, so the
        # others never need a score pass.
        expected_passes = 0
        if case == "real" and not all(together):
            expected_passes = sum(not part for part in together[1:])
        if case.startswith("steer"):
            expected_passes = 3
        assert score_passes == expected_passes
        assert all(together) == (groups == "together")
