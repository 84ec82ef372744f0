"""Resume with other settings: every optimizer key takes effect; every layout resumes in every
other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from pacs_megatron.checkpoint.dist_reader import DistReader
from pacs_megatron.checkpoint.run_checkpoint import latest_checkpoint
from pacs_megatron.config.schema import (
    BatchOptions,
    OptimizerOptions,
    PolicyOptions,
    PrecisionOptions,
)
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import REGISTRY, build_objective
from pacs_megatron.runtime.run_folder import FIXED_KEYS
from tests.support.policies.changed_runs import CHANGED, certify_changed, random_change
from tests.support.policies.plain_trainer import PlainTrainer, pacs_loss
from tests.support.policies.policy_cases import OPTIMIZER, make_policy, train
from tests.support.policies.unseen_runs import COMBINATIONS
from tests.support.ranks import run_ranks
from tests.support.saved_policies import FROZEN, STEPS, continued, load, save
from tests.support.tiers import in_tiers
from tests.support.tiny_families import make_family
from tests.support.tiny_models import make_tiny_qwen3

PACS = PacsOptions(name="pacs")
TOTAL = 12
BASE: dict[str, Any] = {"schedule": "linear", "lr": 1e-3, "min_lr": 2e-4, "weight_decay": 0.1}
CHANGES: dict[str, Any] = {
    "lr": 4e-4,
    "min_lr": 8e-4,
    "weight_decay": 2.0,
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "adam_eps": 1e-2,
    "schedule": "constant",
    "warmup_updates": 8,
}


def planned_lr(options: dict[str, Any], update: int) -> float:
    """Learning rate of update `update` (from 1) of TOTAL, written from docs/configuration.md."""
    warmup = options.get("warmup_updates", 0)
    if update <= warmup:
        return options["lr"] * update / warmup
    if options["schedule"] == "constant":
        return options["lr"]
    last = TOTAL if options["min_lr"] > 0 else TOTAL + 1
    done = (update - warmup) / (last - warmup)
    return options["min_lr"] + (1 - done) * (options["lr"] - options["min_lr"])


def plain_run(folder: Path, first: dict[str, Any], later: dict[str, Any]) -> dict[str, np.ndarray]:
    """Weights after three updates with the options `first` and three with `later`, by torch's
    AdamW.
    """
    trainer = PlainTrainer(folder)
    matrices = [p for p in trainer.model.parameters() if p.ndim > 1]
    vectors = [p for p in trainer.model.parameters() if p.ndim == 1]
    trainer.optimizer.param_groups.clear()
    trainer.optimizer.add_param_group({"params": matrices})
    trainer.optimizer.add_param_group({"params": vectors})
    for number, step in enumerate(STEPS, start=1):
        options = OPTIMIZER | (first if number <= 3 else later)
        for group, decay in zip(
            trainer.optimizer.param_groups, (options["weight_decay"], 0.0), strict=True
        ):
            group["lr"] = planned_lr(options, number)
            group["betas"] = (options["adam_beta1"], options["adam_beta2"])
            group["eps"] = options["adam_eps"]
            group["weight_decay"] = decay
        trainer.update(*step, pacs_loss(trainer.logprobs(*step), step[0]))
    return trainer.weights()


@pytest.mark.parametrize("distributed", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "key",
    [
        key if key in ("lr", "adam_beta1") else pytest.param(key, marks=pytest.mark.full)
        for key in CHANGES
    ],
)
def test_a_changed_optimizer_key_takes_effect_on_resume(
    tmp_path: Path, key: str, distributed: bool
) -> None:
    """Decay, warm-up and schedule of Megatron against torch's AdamW: norms are not decayed, the
    last update has min_lr.
    """
    model = make_tiny_qwen3(tmp_path / "model", tied=False)
    changed = BASE | {key: CHANGES[key]}
    expected = plain_run(model, BASE, changed)
    unchanged = plain_run(model, BASE, BASE)

    def on_rank(options: dict[str, Any], *, is_resumed: bool) -> Any:
        def run(_rank: int, world: int) -> Any:
            policy = make_policy(
                model,
                world,
                optimizer=options,
                total_updates=TOTAL,
                distributed_optimizer=distributed,
            )
            policy.take_reference(reset_optimizer=False)
            if is_resumed:
                load(policy, tmp_path)
            train(
                policy,
                build_objective(PACS, updates_per_step=1),
                STEPS[3:] if is_resumed else STEPS[:3],
            )
            if not is_resumed:
                save(policy, tmp_path, 3, model)
            return {name: tensor.clone().numpy() for name, tensor in policy.export_weights()}

        return run

    run_ranks(on_rank(BASE, is_resumed=False), 1)
    weights = run_ranks(on_rank(changed, is_resumed=True), 1)[0]
    for name, weight in expected.items():
        np.testing.assert_allclose(weights[name], weight, atol=1e-5, err_msg=name)
    assert max(np.abs(unchanged[name] - expected[name]).max() for name in expected) > 5e-5, (
        "the change has no effect"
    )


@pytest.mark.full
@pytest.mark.parametrize("name", CHANGED)
def test_changed_options_take_effect_from_the_next_update_on(tmp_path: Path, name: str) -> None:
    """Against `certify`'s float64 reference, which changes its options at the same update; the
    layout changes too.
    """
    certificate = certify_changed(tmp_path, CHANGED[name])
    assert certificate.is_green, certificate.line()


@pytest.mark.campaign
@pytest.mark.parametrize("name", COMBINATIONS)
def test_an_unseen_combination_is_green(tmp_path: Path, name: str) -> None:
    certificate = certify_changed(tmp_path, COMBINATIONS[name])
    assert certificate.is_green, certificate.line()


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(40))
def test_a_random_run_with_changed_options_is_green(tmp_path: Path, seed: int) -> None:
    case = random_change(seed, tmp_path / "draws")
    certificate = certify_changed(tmp_path / "run", case)
    assert certificate.is_green, f"{case}: {certificate.line()}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "section", "kept"),
    [
        ("pacs", "objective", {"beta": 1.0}),
        ("grpo", "objective", {"kl_estimator": "k3"}),
        ("ppo", "objective", {"lam": 1.0}),
        ("ppo", "objective", {"critic": {"lr": 2e-3}}),
        ("dapo", "objective", {"overlong_penalty": 1.0}),
        ("pacs", "optimizer", {"adam_beta2": 0.95}),
    ],
)
def test_a_changed_option_without_effect_is_found(
    tmp_path: Path, name: str, section: str, kept: dict[str, Any]
) -> None:
    certificate = certify_changed(tmp_path, CHANGED[name], ignored={section: kept})
    assert not certificate.is_green


ELSEWHERE = {
    "objective.clip_grad": "`Changed.clip`",
    "objective.critic.warmup_steps": "tests/distributed/policy/test_critic.py",
    "precision.dtype": "test_another_dtype_continues_from_master_weights_and_moments",
    "precision.head": "without state: tests/distributed/policy/test_head.py",
    "precision.fp8": "without state; CUDA only",
    "policy.lora": "rejected: tests/unit/checkpoint/test_adapters.py",
    "policy.offload": "the same bits: tests/distributed/policy/test_offload.py",
    "policy.routing": "tests/distributed/policy/test_routing.py",
}


def keys_of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def changed_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield from (
            changed_keys(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else [prefix + name]
        )


def test_every_key_that_changes_an_update_has_a_case() -> None:
    """Keys of the schema that a resume may change; layouts (`parallel`) have a table, other
    sections change no update.
    """
    keys = set()
    for kind in REGISTRY.values():
        for key in keys_of(kind.options_class, "objective."):
            keys.add(key)
    models = {"precision": PrecisionOptions, "policy": PolicyOptions, "batch": BatchOptions}
    for section, model in (models | {"optimizer": OptimizerOptions}).items():
        keys |= set(keys_of(model, f"{section}."))
    cases = itertools.chain.from_iterable(changed_keys(case.later) for case in CHANGED.values())
    changed = {key for key in cases if not key.startswith("rollout.")}
    changed |= {f"optimizer.{name}" for name in CHANGES} | set(ELSEWHERE)
    assert {key for key in keys if not key.startswith(FIXED_KEYS)} == changed


@pytest.mark.full
def test_another_dtype_continues_from_master_weights_and_moments(tmp_path: Path) -> None:
    """fp32, then bf16, then fp32, two updates each.

    The bf16 gradients change a tensor by 5e-6 to 3e-5 in the mean; master weights that were rounded
    once by 1.3e-4 or more, lost moments by 4.6e-4 or more.
    """
    model = make_tiny_qwen3(tmp_path / "model", tied=False)
    trainer = PlainTrainer(model)
    for step in STEPS:
        trainer.update(*step, pacs_loss(trainer.logprobs(*step), step[0]))

    def on_rank(dtype: Any, first: int) -> Any:
        def run(_rank: int, world: int) -> Any:
            policy = make_policy(model, world, dtype=dtype)
            policy.take_reference(reset_optimizer=False)
            if first:
                load(policy, tmp_path)
            train(policy, build_objective(PACS, updates_per_step=1), STEPS[first : first + 2])
            save(policy, tmp_path, first + 2, model)
            return {name: tensor.float().numpy().copy() for name, tensor in policy.export_weights()}

        return run

    weights = [
        run_ranks(on_rank(dtype, 2 * k), 1)[0] for k, dtype in enumerate(("fp32", "bf16", "fp32"))
    ][-1]
    for name, weight in trainer.weights().items():
        assert np.abs(weights[name] - weight).mean() < 5e-5, name


DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "dp2-distopt": (2, {"distributed_optimizer": True}),
    "tp2-dp2-distopt": (4, {"tp": 2, "distributed_optimizer": True}),
    "pp2-distopt": (2, {"pp": 2, "distributed_optimizer": True}),
}
MOE: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "ep2": (2, {"ep": 2}),
    "pp2-ep2": (4, {"pp": 2, "ep": 2}),
    "dp2-distopt": (2, {"distributed_optimizer": True}),
    "ep2-dp4-distopt": (4, {"ep": 2, "distributed_optimizer": True}),
}
SAVED = {
    **{f"qwen3-{saved}": ("qwen3", saved) for saved in DENSE},
    **{f"qwen3_moe-{saved}": ("qwen3_moe", saved) for saved in MOE},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", in_tiers(SAVED, every=2))
def test_every_layout_resumes_in_every_other(tmp_path: Path, name: str) -> None:
    """Losses, norms and weights of three more updates are those of the run that was not
    interrupted.
    """
    family, saved = SAVED[name]
    layouts = DENSE if family == "qwen3" else MOE
    check_resumes(tmp_path, family, layouts[saved], layouts)


def test_a_plain_optimizer_and_a_distributed_one_exchange_their_state(tmp_path: Path) -> None:
    """Both directions, with experts on one rank and on two."""
    one = MOE["one"]
    spread = MOE["ep2-dp4-distopt"]
    check_resumes(tmp_path / "gather", "qwen3_moe", spread, {"one": one})
    check_resumes(tmp_path / "spread", "qwen3_moe", one, {"ep2-dp4-distopt": spread})


@pytest.mark.full
@pytest.mark.parametrize("dtypes", [("bf16", "fp32"), ("fp32", "bf16")])
@pytest.mark.parametrize(
    ("saved", "loaded"), [("ep2-dp4-distopt", "one"), ("one", "ep2-dp4-distopt")]
)
def test_the_optimizer_keeps_its_bits_in_another_layout_and_dtype(
    tmp_path: Path, saved: str, loaded: str, dtypes: tuple[str, str]
) -> None:
    """fp32 master weights, moments and Adam's step are read and written without a change of one
    bit.
    """
    model = make_family(tmp_path / "model", "qwen3_moe", vocab_size=272)

    def on_rank(name: str, dtype: str, *, is_first: bool) -> Any:
        def run(_rank: int, world: int) -> int:
            policy = make_policy(model, world, dtype=dtype, **MOE[name][1])
            policy.take_reference(reset_optimizer=False)
            if is_first:
                train(policy, build_objective(FROZEN, updates_per_step=1), STEPS[:3])
            else:
                load(policy, tmp_path / "first")
            save(policy, tmp_path / ("first" if is_first else "second"), 3, model)
            return policy.optimizer.adam_step

        return run

    steps = run_ranks(on_rank(saved, dtypes[0], is_first=True), MOE[saved][0])
    steps += run_ranks(on_rank(loaded, dtypes[1], is_first=False), MOE[loaded][0])
    assert set(steps) == {3}
    first, second = (
        DistReader(latest_checkpoint(tmp_path / name) / "dist") for name in ("first", "second")
    )
    keys = {key for key in first.keys if key.startswith("optimizer.")}
    assert (
        len(keys) == 3 * sum(key.startswith("model.") for key in first.keys) > 0
        and keys <= second.keys
    )
    for key in keys:
        assert torch.equal(first.get(key), second.get(key)), key


def check_resumes(folder: Path, family: str, saved: Any, layouts: dict[str, Any]) -> None:
    model = make_family(folder / "model", family, vocab_size=272, num_hidden_layers=4)
    world, options = saved

    def saving(_rank: int, world: int) -> Any:
        policy = make_policy(model, world, **options)
        policy.take_reference(reset_optimizer=False)
        train(policy, build_objective(FROZEN, updates_per_step=1), STEPS[:3])
        save(policy, folder, 3, model)
        return continued(policy)

    expected = run_ranks(saving, world)[0]
    for name, (ranks, target) in layouts.items():

        def loading(_rank: int, world: int, target: dict[str, Any] = target) -> Any:
            policy = make_policy(model, world, **target)
            load(policy, folder)
            return continued(policy)

        found = run_ranks(loading, ranks)[0]
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(found["norm"], expected["norm"], rtol=1e-4, err_msg=name)
        for key, weight in expected["weights"].items():
            np.testing.assert_allclose(
                found["weights"][key], weight, atol=2e-6, err_msg=f"{name} {key}"
            )


def test_a_schedule_counts_the_updates_that_steps_planned(tmp_path: Path) -> None:
    """A step with fewer groups than updates does not delay the decay."""
    model = make_tiny_qwen3(tmp_path / "model", tied=False)

    def on_rank(_rank: int, world: int) -> list[float]:
        policy = make_policy(model, world, optimizer=BASE | {"min_lr": 0.0}, total_updates=TOTAL)
        objective = build_objective(PACS, updates_per_step=1)
        reports = train(policy, objective, STEPS[:2])
        policy.optimizer.advance_schedule(2)
        policy.optimizer.advance_schedule(TOTAL - 1)
        return [r.lr for r in reports + train(policy, objective, STEPS[2:3])]

    options = BASE | {"min_lr": 0.0}
    rates = run_ranks(on_rank, 1)[0]
    np.testing.assert_allclose(
        rates, [planned_lr(options, update) for update in (1, 2, TOTAL)], rtol=1e-12
    )
    assert rates[-1] > 0, "the last update of a schedule to 0 still changes weights"
