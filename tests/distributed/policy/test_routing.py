"""Routing of experts: recorded as transformers chooses, and replayed in every layout, packing and
recomputation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.config.schema import BatchOptions
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.policy.routing import Routing
from pacs_megatron.training.distribute import cut_step
from pacs_megatron.training.progress import Logprobs, OpenStep
from pacs_megatron.workbench.certify.reference_adam import Adam
from pacs_megatron.workbench.certify.reference_model import Model
from tests.support.policies.objective_reference import reference_loss
from tests.support.policies.policy_cases import (
    CLIP_GRAD,
    OPTIMIZER,
    by_row,
    column_of,
    logprobs_by_row,
    make_part,
    make_policy,
    random_step,
)
from tests.support.ranks import run_ranks
from tests.support.tiers import in_test
from tests.support.tiny_families import make_family

STEP = random_step(3)
FACTS, TOKENS = STEP
FULL = {"recompute": {"granularity": "full"}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "recompute-full": (1, FULL),
    "recompute-moe": (1, {"recompute": {"granularity": "selective", "modules": ["moe"]}}),
    "pp2-recompute": (2, {"pp": 2} | FULL),
    "vpp2-recompute": (2, {"pp": 2, "vpp": 2} | FULL),
    "tp2ep2": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "cp2ep2": (2, {"cp": 2, "ep": 2}),
    "pp2ep2-distopt": (4, {"pp": 2, "ep": 2, "distributed_optimizer": True}),
}
LAYERS = 4
EXPERTS = 4
TOP_K = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {
        "vocab_size": 272,
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
    }
    return make_family(tmp_path_factory.mktemp("moe"), "qwen3_moe", **shape)


def other_routes() -> dict[int, np.ndarray]:
    """Random experts of every token: most differ from the model's own choice."""
    rng = np.random.default_rng(5)
    return {
        row: rng.permuted(np.tile(np.arange(EXPERTS), (length - 1, LAYERS, 1)), axis=2)[
            :, :, :TOP_K
        ].astype(np.int16)
        for row, length in enumerate(FACTS.lens)
    }


def reference(folder: Path, routes: dict[int, np.ndarray] | None) -> Any:
    """(routes of each row, log-probs, gradient norm, weights after one update at lr) in float64,
    one sample a forward.
    """
    model = Model(folder, 1.0)
    chosen = {}
    logps = []
    for row in range(FACTS.num_samples):
        ids = TOKENS.token_ids[TOKENS.offsets[row] : TOKENS.offsets[row + 1]]
        given: list[Any] = [None] * LAYERS
        if routes is not None:  # the last token is no input of the product
            last = np.tile(np.arange(TOP_K, dtype=np.int16), (1, LAYERS, 1))
            given = list(torch.from_numpy(np.concatenate([routes[row], last])).long().unbind(1))
        logps.append(model.sample(ids, int(FACTS.prompt_lens[row]), given)[0])
        chosen[row] = torch.stack([router.chosen for router in model.routers], 1)[:-1].numpy()
    starts = [logp.detach() * 0.99 for logp in logps]
    loss, _ = reference_loss({"name": "pacs"}, FACTS, logps, starts=starts)
    loss.backward()
    options = OPTIMIZER | {"weight_decay": 0.0, "warmup_updates": 0, "schedule": "constant"}
    adam = Adam(model.parameters, options, CLIP_GRAD, 1)
    norm = adam.norm()
    adam.step(OPTIMIZER["lr"])
    weights = {name: value.copy() for name, value in model.named(model.parameters).items()}
    return chosen, [logp.detach().numpy() for logp in logps], norm, weights


@pytest.mark.full
def test_the_update_replays_the_experts_of_its_score_pass(folder: Path) -> None:
    """Without a `step_start` pass: the micro-batches of split groups replay, those of whole groups
    choose.
    """

    def body(_rank: int, world_size: int) -> Any:
        policy = make_policy(folder, world_size, tokens_per_microbatch=52, **FULL)
        policy.take_reference(reset_optimizer=False)
        objective = build_objective(
            PacsOptions(name="pacs", reference="frozen"), updates_per_step=2
        )
        minibatch = make_part(FACTS, TOKENS, policy, 52, index=1, keep_groups=True)
        frozen = policy.logprobs(minibatch, "reference")
        replayed: list[int] = []
        real = Routing._experts_to_replay

        def counted(self: Any, batch: Any, *args: Any) -> Any:
            replayed.extend(batch.rows.tolist())
            return real(self, batch, *args)

        # This process ends with the test.
        Routing._experts_to_replay = counted  # type: ignore[method-assign]
        report = policy.update(replace(minibatch, reference_logprobs=frozen), objective, None)
        split = np.flatnonzero(~minibatch.plan.together)
        return (
            sorted(replayed),
            split.tolist(),
            report.metrics["pacs/score_drift_max"],
            FACTS.num_samples,
        )

    replayed, split, drift, samples = run_ranks(body, 1)[0]
    assert replayed == split and 0 < len(split) < samples and drift == 0.0


@pytest.mark.parametrize("case", in_test(CASES, "pp2-recompute", "tp2ep2"))
def test_routes_are_recorded_and_replayed(folder: Path, case: str) -> None:
    world, parallel = CASES[case]
    own_routes, own_logps, own_norm, _ = reference(folder, None)
    routes = other_routes()
    _, logps, norm, weights = reference(folder, routes)
    assert abs(norm - own_norm) > 0.005 * norm, "the injected routes change the gradient"
    starts = {row: (0.99 * logp).astype(np.float32) for row, logp in enumerate(logps)}

    def body(rank: int, world_size: int) -> Any:
        policy = make_policy(folder, world_size, tokens_per_microbatch=64, **parallel)
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=2)
        minibatch = make_part(FACTS, TOKENS, policy, 64, index=1, keep_groups=True)
        assert len(minibatch.plan.by_dp_rank[policy.rank.dp]) > 1
        own = policy.logprobs(minibatch, "step_start")
        results = Logprobs.of_samples(minibatch.tokens)
        results.columns["step_start"] = own
        results.routes = policy.routes
        step = OpenStep(updates=1, logprobs=[results])
        record = step.to_record(policy.rank, {})
        report = policy.update(
            replace(minibatch, step_start_logprobs=column_of(minibatch, starts), routes=routes),
            objective,
            None,
        )
        exported = {name: tensor.float().numpy().copy() for name, tensor in policy.export_weights()}
        restored = None if record is None else OpenStep.from_record(record, {}).logprobs
        return by_row(minibatch, own), report, exported, restored

    results = run_ranks(body, world)
    for own, report, exported, restored in results:
        for row, found in own.items():
            np.testing.assert_allclose(found, own_logps[row], atol=2e-5)
        assert report.grad_norm == pytest.approx(norm, rel=1e-4)
        for name, value in exported.items():
            np.testing.assert_allclose(
                value, weights[name], atol=0.01 * OPTIMIZER["lr"], err_msg=name
            )
        if restored is not None:  # the checkpoint of a step in progress has every rank's part
            assert sorted(restored[0].routes) == list(range(FACTS.num_samples))
            for row, found in restored[0].routes.items():
                own_sets = np.sort(own_routes[row], axis=-1)
                np.testing.assert_array_equal(
                    np.sort(found.reshape(own_sets.shape), axis=-1), own_sets
                )


@pytest.mark.parametrize("case", in_test(CASES, "tp2ep2"))
def test_training_follows_the_experts_of_the_sampler(folder: Path, case: str) -> None:
    """Recorded with the samples, cut with the tokens: the `step_start` pass and the update use
    them, and a wrong one shows.
    """
    world, parallel = CASES[case]
    routes = other_routes()
    _, logps, norm, weights = reference(folder, routes)
    wrong_row = 2
    token = int(FACTS.prompt_lens[2])
    wrong = {row: found.copy() for row, found in routes.items()}
    wrong[wrong_row][token] = (wrong[wrong_row][token] + 1) % EXPERTS
    starts = {row: (0.99 * logp).astype(np.float32) for row, logp in enumerate(logps)}
    options = BatchOptions(prompts_per_step=4, samples_per_prompt=4, tokens_per_microbatch=64)

    def body(_rank: int, world_size: int) -> Any:
        policy = make_policy(folder, world_size, tokens_per_microbatch=64, **parallel)
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=2)
        found = []
        for experts in (routes, wrong):
            tokens = replace(
                TOKENS, routes=np.concatenate([experts[row] for row in range(FACTS.num_samples)])
            )
            own = tokens if policy.rank.rank == 0 else None
            [minibatch] = cut_step(FACTS, own, policy.rank, options, objective)
            found.append(logprobs_by_row(policy, minibatch))
            assert policy.routes is minibatch.routes
        [minibatch] = cut_step(
            FACTS,
            replace(tokens, routes=other) if own is not None else None,
            policy.rank,
            options,
            objective,
        )
        minibatch = replace(minibatch, index=1, step_start_logprobs=column_of(minibatch, starts))
        report = policy.update(minibatch, objective, None)
        return (
            *found,
            report,
            {name: tensor.float().numpy().copy() for name, tensor in policy.export_weights()},
        )

    other = np.concatenate([routes[row] for row in range(FACTS.num_samples)])
    for right, changed, report, exported in run_ranks(body, world, timeout=120):
        for row, found in right.items():
            np.testing.assert_allclose(found, logps[row], atol=2e-5)
            is_other = np.abs(changed[row] - found) > 1e-4
            assert is_other.any() if row == wrong_row else not is_other.any(), (
                "a wrong expert of one token"
            )
        assert report.grad_norm == pytest.approx(norm, rel=1e-4)
        for name, value in exported.items():
            np.testing.assert_allclose(
                value, weights[name], atol=0.01 * OPTIMIZER["lr"], err_msg=name
            )


@pytest.mark.parametrize("parallel", [{}, FULL], ids=["none", "full"])
def test_a_pass_keeps_experts_in_two_bytes_and_only_for_recomputation(
    folder: Path, parallel: dict[str, Any]
) -> None:
    """int64 on the GPU for 48 layers and 8 experts is 3 KB a token: 1.5 GB for a pass over 500,000
    tokens.
    """

    def body(_rank: int, world_size: int) -> Any:
        policy = make_policy(folder, world_size, tokens_per_microbatch=52, **parallel)
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        minibatch = make_part(FACTS, TOKENS, policy, 52)
        kept: list[tuple[int, set[Any], bool]] = []

        def look() -> None:
            for layer in policy.models[0].decoder.layers:
                router = layer.mlp.router.router_replay
                experts = router.replay_backward_list
                is_free = router.recorded_topk_idx is None and router.target_topk_idx is None
                kept.append((len(experts), {one.dtype for one in experts}, is_free))

        policy.on_microbatch(look)
        starts = policy.logprobs(minibatch, "step_start")
        in_pass = list(kept)
        kept.clear()
        minibatch = replace(minibatch, step_start_logprobs=starts, routes=policy.routes)
        policy.update(minibatch, objective, None)
        return len(minibatch.plan.by_dp_rank[0]), in_pass, kept

    planned, in_pass, in_update = run_ranks(body, 1)[0]
    assert planned > 2 and len(in_pass) == planned * LAYERS
    assert all(one == (0, set(), True) for one in in_pass)
    # Without pipeline stages a backward pass follows each forward pass, and takes its experts.
    assert all(one == (0, set(), True) for one in in_update)
