"""Clipping, non-finite numbers and samples without gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.contracts import SampleFacts
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.policies.plain_trainer import PlainTrainer, pacs_loss
from tests.support.policies.policy_cases import make_part, make_policy, random_step, train
from tests.support.ranks import run_ranks
from tests.support.tiers import in_test
from tests.support.tiny_families import make_family

STEPS = [random_step(seed) for seed in range(3)]
BUDGET = 64
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {}),
    "dp2-distopt": (2, {"distributed_optimizer": True}),
    "cp2": (2, {"cp": 2}),
}
PACS = PacsOptions(name="pacs")


def weights_of(policy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export_weights()}


def state_of(policy: Any) -> list[torch.Tensor]:
    """Model, master weights and moments of this rank."""
    tensors = []
    for model in policy.models:
        for p in model.parameters():
            tensors.append(p.detach().clone())
    for adam in policy.optimizer.optimizers():
        for group in adam.optimizer.param_groups:
            tensors += [p.detach().clone() for p in group["params"]]
        for state in adam.optimizer.state.values():
            tensors += [value.clone() for value in state.values() if torch.is_tensor(value)]
    return tensors


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("clip", [pytest.param(0.0, marks=pytest.mark.full), 0.01])
def test_the_global_norm_is_clipped_alike_at_every_layout(
    tiny_qwen3_tied: Path, layout: str, clip: float
) -> None:
    """At 0.01 (Adam's epsilon is 1e-3 here) the clip decides the step; 0 is off."""
    world, options = LAYOUTS[layout]
    trainer = PlainTrainer(tiny_qwen3_tied, clip=clip)
    other = PlainTrainer(tiny_qwen3_tied, clip=0.01 - clip)
    expected = [
        trainer.update(*step, pacs_loss(trainer.logprobs(*step), step[0])) for step in STEPS
    ]
    for step in STEPS:
        other.update(*step, pacs_loss(other.logprobs(*step), step[0]))

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(
            tiny_qwen3_tied, world, tokens_per_microbatch=BUDGET, clip_grad=clip, **options
        )
        reports = train(
            policy, build_objective(PACS, updates_per_step=1), STEPS, tokens_per_microbatch=BUDGET
        )
        return [r.grad_norm for r in reports], {k: v.numpy() for k, v in weights_of(policy).items()}

    norms, weights = run_ranks(on_rank, world)[0]
    assert min(norms) > 0.1, "the norm before clipping is reported"
    np.testing.assert_allclose(norms, [e[1] for e in expected], rtol=5e-5)
    wrong = other.weights()
    for name, weight in trainer.weights().items():
        np.testing.assert_allclose(weights[name], weight, atol=5e-6, err_msg=name)
        assert np.abs(wrong[name] - weight).max() > 1e-4, "clipped and unclipped runs must differ"


def poison_weight(policy: Any) -> None:
    """An Inf in one weight of the last rank only."""
    if policy.rank.rank == policy.rank.layout.world_size - 1:
        parameter = next(
            p for name, p in policy.models[-1].named_parameters() if "linear_fc2" in name
        )
        parameter.data.view(-1)[3] = float("inf")


@pytest.mark.parametrize("dtype", in_test(["fp32", "bf16"], "bf16"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_non_finite_gradient_reaches_no_weight_on_any_rank(
    tiny_qwen3: Path, layout: str, dtype: str
) -> None:
    """The NaN arises on one rank only; all raise, and everything is as it was, bit for bit."""
    world, options = LAYOUTS[layout]

    def on_rank(rank: int, world: int) -> Any:
        policy = make_policy(
            tiny_qwen3, world, tokens_per_microbatch=BUDGET, dtype=dtype, **options
        )
        objective = build_objective(PACS, updates_per_step=1)
        train(policy, objective, STEPS[:1], tokens_per_microbatch=BUDGET)
        before = state_of(policy)
        version = policy.version
        updates = policy.optimizer.num_updates
        clean_finish = policy.config.finalize_model_grads_func

        def poisoned(model: Any, *args: Any, **kwargs: Any) -> None:
            if rank == world - 1:
                next(iter(policy.models[0].parameters())).main_grad.view(-1)[0] = float("nan")
            clean_finish(model, *args, **kwargs)

        policy.config.finalize_model_grads_func = poisoned
        with pytest.raises(NonFiniteError, match="no weight was changed"):
            train(policy, objective, STEPS[1:2], tokens_per_microbatch=BUDGET)
        same = all(torch.equal(a, b) for a, b in zip(before, state_of(policy), strict=True))
        policy.config.finalize_model_grads_func = clean_finish
        (report,) = train(policy, objective, STEPS[1:2], tokens_per_microbatch=BUDGET)
        return (
            same,
            policy.version - version,
            policy.optimizer.num_updates - updates,
            report.grad_norm,
        )

    for same, versions, updates, norm in run_ranks(on_rank, world):
        assert same
        assert (versions, updates) == (1, 1), "only the good update counts"
        assert np.isfinite(norm)


@pytest.mark.parametrize("layout", in_test(["one", "tp2-sp", "pp2", "dp2"], "tp2-sp", "dp2"))
def test_an_infinite_weight_stops_update_and_score_pass_on_all_ranks(
    tiny_qwen3: Path, layout: str
) -> None:
    world, options = LAYOUTS[layout]

    def on_rank(_rank: int, world: int) -> None:
        policy = make_policy(tiny_qwen3, world, tokens_per_microbatch=BUDGET, **options)
        poison_weight(policy)
        objective = build_objective(PACS, updates_per_step=1)
        with pytest.raises(NonFiniteError, match="gradient norm"):
            train(policy, objective, STEPS[:1], tokens_per_microbatch=BUDGET)
        mean = build_objective(
            PacsOptions(name="pacs", reward_proxy="mean_log_prob"), updates_per_step=1
        )
        with pytest.raises(NonFiniteError, match="score of sample"):
            policy.scores(make_part(*STEPS[0], policy, BUDGET), mean)

    run_ranks(on_rank, world)


def test_a_non_finite_coefficient_is_rejected_before_any_pass(tiny_qwen3: Path) -> None:
    def on_rank(_rank: int, world: int) -> None:
        policy = make_policy(tiny_qwen3, world)
        objective = build_objective(PACS, updates_per_step=1)
        minibatch = make_part(*STEPS[0], policy)
        prepared = objective.prepare(None, minibatch.facts, None)
        prepared.per_sample["coefficient"][2] = float("nan")
        objective.prepare = lambda *_: prepared
        before = state_of(policy)
        with pytest.raises(NonFiniteError, match="'coefficient'"):
            policy.update(minibatch, objective, None)
        assert all(torch.equal(a, b) for a, b in zip(before, state_of(policy), strict=True))

    run_ranks(on_rank, 1)


def with_labels(facts: SampleFacts, one_class_groups: list[int]) -> SampleFacts:
    """Groups of one class where named; the others mixed."""
    labels = np.tile([0.0, 1.0], facts.num_samples)[: facts.num_samples]
    labels[np.isin(facts.groups, one_class_groups)] = 1.0
    return replace(facts, labels=labels, rewards=labels)


@pytest.mark.parametrize(
    "layout",
    in_test(["one", "tp2-sp", "pp2", "dp2", "cp2", "vpp2", "ep2"], "tp2-sp", "dp2", "vpp2", "ep2"),
)
def test_leaving_samples_without_gradient_out_changes_nothing(tmp_path: Path, layout: str) -> None:
    """Some ranks then have no sample at all, and run an empty micro-batch where peers wait for
    them.
    """
    more = {"vpp2": (2, {"pp": 2, "vpp": 2}), "ep2": (2, {"ep": 2})}
    world, options = (LAYOUTS | more)[layout]
    folder = make_family(
        tmp_path / "model",
        "qwen3_moe" if layout == "ep2" else "qwen3",
        vocab_size=272,
        num_hidden_layers=4,
    )
    facts, tokens = random_step(5, num_groups=4, group_size=2)
    facts = with_labels(facts, [0, 1, 2])

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(folder, world, tokens_per_microbatch=24, **options)
        objective = build_objective(PACS, updates_per_step=1)
        start = {name: t.clone() for name, t in policy.export_weights()}
        minibatch = make_part(facts, tokens, policy, 24)
        prepared = objective.prepare(None, minibatch.facts, None)
        assert prepared.zero_gradient is not None and int(prepared.zero_gradient.sum()) == 6
        forwarded: list[int] = []
        batches_of = policy._batches
        policy._batches = lambda *args, **kwargs: [
            b for b in batches_of(*args, **kwargs) if forwarded.append(len(b.rows)) is None
        ]
        short = policy.update(minibatch, objective, None)
        num_short = sum(forwarded)
        after_short = weights_of(policy)
        policy.load_weights(lambda name: start[name])
        policy.optimizer.reset_moments()
        forwarded.clear()
        objective.prepare = lambda *_: replace(prepared, zero_gradient=None)
        whole = policy.update(minibatch, objective, None)
        return num_short, sum(forwarded), short, whole, after_short, weights_of(policy)

    results = run_ranks(on_rank, world)
    replicas = 2 if layout in ("dp2", "ep2") else 1
    per_replica = results if replicas == 2 else results[:1]
    assert sum(r[0] for r in per_replica) == 2 and sum(r[1] for r in per_replica) == 8
    _, _, short, whole, after_short, after_whole = results[0]
    np.testing.assert_allclose(short.grad_norm, whole.grad_norm, rtol=1e-5)
    assert short.metrics["objective/loss"] == whole.metrics["objective/loss"]
    for name, weight in after_whole.items():
        np.testing.assert_allclose(after_short[name], weight, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("layout", ["dp2", "pp2", "ep2"])
def test_an_update_whose_samples_all_lack_a_gradient_still_ends(
    tmp_path: Path, layout: str
) -> None:
    world, options = (LAYOUTS | {"ep2": (2, {"ep": 2})})[layout]
    folder = make_family(
        tmp_path / "model", "qwen3_moe" if layout == "ep2" else "qwen3", vocab_size=272
    )
    facts, tokens = random_step(5)
    facts = with_labels(facts, list(range(facts.num_groups)))

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(folder, world, tokens_per_microbatch=BUDGET, **options)
        before = weights_of(policy)
        (report,) = train(
            policy,
            build_objective(PACS, updates_per_step=1),
            [(facts, tokens)],
            tokens_per_microbatch=BUDGET,
        )
        return report, all(torch.equal(before[name], t) for name, t in policy.export_weights())

    for report, same in run_ranks(on_rank, world):
        assert report.grad_norm == 0.0 and same
        assert report.metrics["pacs/one_class_group_frac"] == 1.0


@pytest.mark.parametrize("distributed", [False, True])
def test_an_update_without_gradient_still_takes_an_adam_step(
    tiny_qwen3: Path, distributed: bool
) -> None:
    """The moments of the update before still move the weights, as with torch's AdamW."""
    facts, tokens = STEPS[1]
    steps = [STEPS[0], (with_labels(facts, list(range(facts.num_groups))), tokens)]
    trainer = PlainTrainer(tiny_qwen3)
    for step in steps:
        before = trainer.weights()
        trainer.update(*step, pacs_loss(trainer.logprobs(*step), step[0]))
    expected = trainer.weights()

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(
            tiny_qwen3, world, tokens_per_microbatch=BUDGET, distributed_optimizer=distributed
        )
        reports = train(
            policy, build_objective(PACS, updates_per_step=1), steps, tokens_per_microbatch=BUDGET
        )
        return reports[1].grad_norm, {
            name: tensor.numpy() for name, tensor in weights_of(policy).items()
        }

    norm, weights = run_ranks(on_rank, 1)[0]
    assert norm == 0.0
    assert max(np.abs(expected[name] - before[name]).max() for name in expected) > 1e-4
    for name, weight in expected.items():
        np.testing.assert_allclose(weights[name], weight, atol=5e-6, err_msg=name)
