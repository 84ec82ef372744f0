"""The measurement of score noise on the real policy: it finds injected differences and changes no
number of training.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.policies.policy_cases import make_part, make_policy, random_step, with_passes
from tests.support.ranks import run_ranks
from tests.support.tiny_families import make_family

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {"distributed_optimizer": True}),
}
LAYOUT = pytest.mark.parametrize(
    "layout",
    [name if name == "dp2" else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS],
)
SIGMA = 0.02
SIZE = 4
FACTS, TOKENS = random_step(11, num_groups=24, group_size=SIZE)
OPTIONS = {
    "step_start": PacsOptions(name="pacs"),
    "frozen": PacsOptions(name="pacs", reference="frozen", beta=0.5),
    "mean": PacsOptions(
        name="pacs", reward_proxy="mean_log_prob", score="grpo", score_std_floor=1e-9
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(
        tmp_path_factory.mktemp("model"), "qwen3", vocab_size=272, num_hidden_layers=4
    )


@LAYOUT
def test_injected_noise_is_found(model: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each packing adds its own differences of sd SIGMA a token: sqrt(2) times the noise of one
    packing.
    """
    world, options = LAYOUTS[layout]

    def on_rank(_rank: int, world: int) -> list[dict[str, float]]:
        from megatron.core import parallel_state

        from pacs_megatron.policy import schedule

        policy = make_policy(model, world, tokens_per_microbatch=96, **options)
        policy.take_reference(reset_optimizer=False)
        objective = build_objective(OPTIONS["frozen"], updates_per_step=2)
        minibatch = with_passes(policy, objective, make_part(FACTS, TOKENS, policy, 96))
        rows = np.arange(FACTS.num_samples)
        clean = policy.score_noise(minibatch, objective, rows)
        exact = schedule.forward
        seed = iter(range(100))

        def noisy(chunks: Any, batches: Any, read: Any, *args: Any, **options: Any) -> list[Any]:
            place = 10 * policy.rank.dp + parallel_state.get_context_parallel_rank()
            generator = torch.Generator().manual_seed(100 * place + next(seed))

            def read_noisy(batch: Any, logprobs: torch.Tensor, entropies: torch.Tensor) -> Any:
                noise = SIGMA * torch.randn(logprobs.shape, generator=generator)
                return read(batch, logprobs + noise, entropies)

            return exact(chunks, batches, read_noisy, *args, **options)

        monkeypatch.setattr(schedule, "forward", noisy)
        return [clean, policy.score_noise(minibatch, objective, rows)]

    results = run_ranks(on_rank, world)
    assert all(found == results[0] for found in results), "the same metrics on every rank"
    clean, noisy = results[0]
    lens = FACTS.response_lens
    others = np.bincount(FACTS.groups, weights=lens)[FACTS.groups] - lens
    predicted = 0.5 * SIGMA * np.sqrt(2 * (lens + others / (SIZE - 1) ** 2).mean())
    assert clean["pacs/score_noise"] < 1e-5
    assert noisy["pacs/score_noise"] == pytest.approx(predicted, rel=0.25)
    assert noisy["pacs/score_noise_exponent"] == pytest.approx(0.5, abs=0.4)


@LAYOUT
@pytest.mark.parametrize("name", OPTIONS)
def test_the_measurement_changes_no_number_of_training(model: Path, layout: str, name: str) -> None:
    world, options = LAYOUTS[layout]

    def on_rank(*, measures: bool) -> Any:
        def run(_rank: int, world: int) -> Any:
            policy = make_policy(model, world, tokens_per_microbatch=96, **options)
            policy.take_reference(reset_optimizer=False)
            objective = build_objective(OPTIONS[name], updates_per_step=2)
            minibatches = [
                with_passes(
                    policy,
                    objective,
                    make_part(*random_step(seed), policy, 96, index=seed, keep_groups=True),
                )
                for seed in range(2)
            ]
            if measures:
                assert policy.score_noise(
                    minibatches[0], objective, np.flatnonzero(minibatches[0].facts.groups < 2)
                )
            reports = [policy.update(part, objective, None) for part in minibatches]
            weights = {key: tensor.clone().numpy() for key, tensor in policy.export_weights()}
            return [(dict(r.metrics), r.grad_norm) for r in reports], weights

        return run

    without, measured = (
        run_ranks(on_rank(measures=measures), world)[0] for measures in (False, True)
    )
    assert without[0] == measured[0]
    for key, weight in without[1].items():
        np.testing.assert_array_equal(measured[1][key], weight, err_msg=key)


@pytest.mark.full
def test_experts_recorded_for_later_epochs_are_not_replayed_in_another_packing(
    tmp_path: Path,
) -> None:
    """Each rank has recorded those of its own tokens,
    which another packing gives to other ranks.
    """
    world, options = LAYOUTS["tp2-sp"]
    model = make_family(tmp_path / "model", "qwen3_moe", vocab_size=272)

    def on_rank(_rank: int, world: int) -> dict[str, float]:
        policy = make_policy(model, world, tokens_per_microbatch=96, **options)
        objective = build_objective(OPTIONS["step_start"], updates_per_step=2)
        part = make_part(FACTS, TOKENS, policy, 96, keep_groups=True)
        starts = policy.logprobs(part, "step_start")
        part = replace(part, step_start_logprobs=starts, routes=policy.routes)
        return policy.score_noise(part, objective, np.flatnonzero(FACTS.groups % 6 == 0))

    results = run_ranks(on_rank, world)
    assert (
        all(found == results[0] for found in results) and 0 < results[0]["pacs/score_noise"] < 1e-4
    )
