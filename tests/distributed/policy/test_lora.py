"""Adapters on Megatron's layers against LoRA by hand on transformers in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.config.schema import LORA_TARGETS, LoraOptions
from pacs_megatron.models import load_spec, weight_table
from pacs_megatron.models.lora import all_matrices
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.needs import HAS_DELTA_NETS
from tests.support.policies.lora_trainer import LoraTrainer, random_matrices
from tests.support.policies.plain_trainer import PlainTrainer, pacs_loss
from tests.support.policies.policy_cases import (
    logprobs_by_row,
    make_part,
    make_policy,
    random_step,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.saved_policies import load, save
from tests.support.tiers import in_test
from tests.support.tiny_families import make_family

STEPS = [random_step(seed) for seed in range(3)]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FULL_RECOMPUTE = {"recompute": {"granularity": "full"}}
LORA: dict[str, Any] = {"rank": 4, "alpha": 6.0}
"""alpha / rank is neither 1 nor a power of two"""


# (family case, targets, ranks, parallel options)
CASES: dict[str, tuple[str, tuple[str, ...], int, dict[str, Any]]] = {
    "one": ("qwen3", LORA_TARGETS, 1, {}),
    "queries-and-values": ("qwen3", ("q_proj", "v_proj", "up_proj"), 1, {}),
    "tp2": ("qwen3", LORA_TARGETS, 2, {"tp": 2}),
    "tp2-sp": ("qwen3", LORA_TARGETS, 2, {"tp": 2, "sequence_parallel": True}),
    "tp2-sp-values": ("qwen3", ("v_proj", "gate_proj"), 2, {"tp": 2, "sequence_parallel": True}),
    "pp2": ("qwen3", LORA_TARGETS, 2, {"pp": 2}),
    "vpp2": ("qwen3-deep", LORA_TARGETS, 2, {"pp": 2, "vpp": 2}),
    "cp2": ("qwen3", LORA_TARGETS, 2, {"cp": 2}),
    "dp2": ("qwen3", LORA_TARGETS, 2, {}),
    "dp2-distributed-optimizer": ("qwen3", LORA_TARGETS, 2, {"distributed_optimizer": True}),
    "tp2-sp-dp2-distributed-optimizer": (
        "qwen3",
        LORA_TARGETS,
        4,
        {"tp": 2, "sequence_parallel": True, "distributed_optimizer": True},
    ),
    "recompute-full-mlp": ("qwen3", LORA_TARGETS[4:], 1, FULL_RECOMPUTE),
    "recompute-mlp": (
        "qwen3",
        LORA_TARGETS,
        1,
        {"recompute": {"granularity": "selective", "modules": ("mlp",)}},
    ),
    "recompute-full-tp2-sp": (
        "qwen3",
        LORA_TARGETS,
        2,
        {"tp": 2, "sequence_parallel": True} | FULL_RECOMPUTE,
    ),
    "biases-tied-mqa": ("qwen2-tied-mqa", LORA_TARGETS, 1, {}),
    "moe-ep2": ("qwen3_moe", ATTENTION, 2, {"ep": 2}),
    "moe-ep2-distributed-optimizer": (
        "qwen3_moe",
        ATTENTION,
        2,
        {"ep": 2, "distributed_optimizer": True},
    ),
    "moe-tp2-ep2": ("qwen3_moe", ATTENTION, 2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "hybrid-tp2": ("qwen3_5", LORA_TARGETS, 2, {"tp": 2}),
    "hybrid-moe-tp2-sp": ("qwen3_next", LORA_TARGETS, 2, {"tp": 2, "sequence_parallel": True}),
}
QUICK = ("queries-and-values", "tp2-sp", "vpp2", "recompute-full-mlp", "moe-ep2")


@dataclass(frozen=True)
class Expected:
    """Results of the trainer by hand for one model and one set of targets."""

    folder: Path
    options: dict[str, Any]
    start: dict[str, np.ndarray]
    base_logprobs: list[np.ndarray]
    logprobs: list[np.ndarray]
    losses: list[float]
    norms: list[float]
    adapters: dict[str, np.ndarray]


def make_expected(folder: Path, targets: tuple[str, ...]) -> Expected:
    """Three updates by hand, from adapters whose B is not 0."""
    options = {**LORA, "targets": targets}
    matrices = all_matrices(weight_table(load_spec(folder)), LoraOptions(**options))
    start = random_matrices({matrix.name: matrix.shape for matrix in matrices}, seed=3)
    trainer = LoraTrainer(folder, start, **LORA)
    logprobs = [each.numpy() for each in trainer.logprobs(*STEPS[0])]
    found = []
    for facts, tokens in STEPS:
        loss = pacs_loss(trainer.logprobs(facts, tokens), facts)
        found.append(trainer.update(facts, tokens, loss))

    zeros = {name: np.zeros_like(values) for name, values in start.items()}
    base = LoraTrainer(folder, zeros, **LORA)
    return Expected(
        folder=folder,
        options=options,
        start=start,
        base_logprobs=[each.numpy() for each in base.logprobs(*STEPS[0])],
        logprobs=logprobs,
        losses=[loss for loss, _ in found],
        norms=[norm for _, norm in found],
        adapters=trainer.adapters(),
    )


@pytest.fixture(scope="module")
def expected_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Expected]:
    known: dict[tuple[str, tuple[str, ...]], Expected] = {}

    def find(family: str, targets: tuple[str, ...]) -> Expected:
        if (family, targets) not in known:
            changes: dict[str, Any] = {"vocab_size": 272}
            if family.endswith("-deep"):
                changes["num_hidden_layers"] = 4
            name = family.removesuffix("-deep")
            folder = make_family(tmp_path_factory.mktemp("model"), name, **changes)
            known[family, targets] = make_expected(folder, targets)
        return known[family, targets]

    return find


def adapted_policy(expected: Expected, world: int, **options: Any) -> Any:
    """A policy with the adapters of the start."""
    policy = make_policy(
        expected.folder, world, tokens_per_microbatch=64, lora=expected.options, **options
    )
    policy.load_adapters(lambda name: torch.from_numpy(expected.start[name]))
    return policy


def merge_rows(results: list[dict[int, np.ndarray]]) -> dict[int, np.ndarray]:
    merged: dict[int, np.ndarray] = {}
    for result in results:
        merged |= result
    return merged


@pytest.mark.parametrize("name", in_test(CASES, *QUICK))
def test_three_updates_equal_lora_by_hand(expected_of: Any, name: str) -> None:
    family, targets, world, options = CASES[name]
    if name.startswith("hybrid") and not HAS_DELTA_NETS:
        pytest.skip("Megatron-Core 0.16 has no gated delta nets for packed samples")
    expected = expected_of(family, targets)

    def on_rank(rank: int, world: int) -> Any:
        policy = adapted_policy(expected, world, **options)
        from pacs_megatron.policy.lora import BaseModel

        policy.reference = BaseModel(policy.models)
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        part = make_part(*STEPS[0], policy, 64)
        before = logprobs_by_row(policy, part)
        reports = train(policy, objective, STEPS, tokens_per_microbatch=64)
        base = logprobs_by_row(policy, part, "reference")
        adapters = {name: tensor.clone().numpy() for name, tensor in policy.export_adapters()}
        numbers = [(r.metrics["objective/loss"], r.grad_norm) for r in reports]
        return before, base, numbers, adapters if rank == 0 else None

    results = run_ranks(on_rank, world)
    before = merge_rows([result[0] for result in results])
    base = merge_rows([result[1] for result in results])
    assert len(before) == len(base) == STEPS[0][0].num_samples
    for row, logprobs in enumerate(expected.logprobs):
        np.testing.assert_allclose(before[row], logprobs, atol=2e-5)
        np.testing.assert_allclose(base[row], expected.base_logprobs[row], atol=2e-5)
    for result in results:
        assert result[2] == results[0][2], "loss and gradient norm are the same on every rank"
    losses, norms = zip(*results[0][2], strict=True)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(norms, expected.norms, rtol=6e-5)

    got = results[0][3]
    assert set(got) == set(expected.adapters)
    for matrix, values in expected.adapters.items():
        np.testing.assert_allclose(got[matrix], values, atol=5e-6, err_msg=matrix)
        assert np.abs(values - expected.start[matrix]).max() > 1e-4, "not trained by the reference"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"world": 2, "tp": 2, "sequence_parallel": True}, {"world": 2, "pp": 2}),
        pytest.param(
            {"world": 2, "distributed_optimizer": True},
            {"world": 2, "tp": 2},
            marks=pytest.mark.full,
        ),
        pytest.param({"world": 2, "pp": 2}, {"world": 2, "cp": 2}, marks=pytest.mark.full),
    ],
    ids=["sp-to-pp", "distributed-to-tp", "pp-to-cp"],
)
def test_a_resume_in_another_layout(
    expected_of: Any, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """The third update after a resume equals that without one, by hand."""
    expected = expected_of("qwen3", LORA_TARGETS)
    objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)

    def begin(_rank: int, world: int) -> None:
        policy = adapted_policy(expected, world, **_parallel(first))
        train(policy, objective, STEPS[:2], tokens_per_microbatch=64)
        save(policy, tmp_path, 2, expected.folder)

    def resume(_rank: int, world: int) -> Any:
        policy = make_policy(
            expected.folder,
            world,
            tokens_per_microbatch=64,
            lora=expected.options,
            **_parallel(second),
        )
        load(policy, tmp_path, with_reference=False)
        (report,) = train(policy, objective, STEPS[2:], tokens_per_microbatch=64)
        adapters = {name: tensor.clone().numpy() for name, tensor in policy.export_adapters()}
        return report.grad_norm, adapters

    run_ranks(begin, first["world"])
    names = {path.name for path in (tmp_path / "checkpoints" / "step_000002" / "dist").iterdir()}
    assert names, "the checkpoint has tensors"
    norm, adapters = run_ranks(resume, second["world"])[0]
    np.testing.assert_allclose(norm, expected.norms[2], rtol=6e-5)
    for matrix, values in expected.adapters.items():
        np.testing.assert_allclose(adapters[matrix], values, atol=5e-6, err_msg=matrix)


def _parallel(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in case.items() if key != "world"}


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(2, {"tp": 2}, id="tp2"),
        pytest.param(1, {}, id="one", marks=pytest.mark.full),
        pytest.param(2, {"tp": 2, "sequence_parallel": True}, id="tp2-sp", marks=pytest.mark.full),
        pytest.param(2, {"pp": 2}, id="pp2", marks=pytest.mark.full),
        pytest.param(2, {"cp": 2}, id="cp2", marks=pytest.mark.full),
    ],
)
def test_the_base_has_the_bits_of_a_second_copy(
    expected_of: Any, world: int, options: dict[str, Any]
) -> None:
    """At the start and after updates, and the copy is a trained model without adapters. Gradients,
    moments and the copy of a reset have the adapters alone.
    """
    expected = expected_of("qwen3", LORA_TARGETS)

    def of_second_copy(_rank: int, world: int) -> dict[int, np.ndarray]:
        copy = make_policy(expected.folder, world, tokens_per_microbatch=64, **options)
        return logprobs_by_row(copy, make_part(*STEPS[0], copy, 64))

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(
            expected.folder, world, tokens_per_microbatch=64, lora=expected.options, **options
        )
        policy.take_reference(reset_optimizer=False, is_start=True)
        assert not policy.has_snapshot
        part = make_part(*STEPS[0], policy, 64)
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        found = [logprobs_by_row(policy, part)]
        train(policy, objective, STEPS[:2], tokens_per_microbatch=64)
        found.append(logprobs_by_row(policy, part, "reference"))
        trained = logprobs_by_row(policy, part)

        policy.take_reference(reset_optimizer=True)
        assert policy.has_snapshot
        copied = sum(tensor.numel() for tensor in policy.reference.tensors)
        reset = logprobs_by_row(policy, part, "reference")
        (model,) = policy.models
        (chunk,) = policy.chunks
        num_trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        num_gradients = sum(buffer.grad_data.numel() for buffer in chunk.buffers)
        state = sum(tensor.numel() for tensor in policy.optimizer.tensors() if tensor.dim())
        return found, trained, reset, (copied, num_trained, num_gradients, state)

    # The last stage has the log-probs.
    of_copy = run_ranks(of_second_copy, world)[-1]
    found, trained, reset, sizes = run_ranks(on_rank, world)[-1]
    assert of_copy
    for row, values in of_copy.items():
        np.testing.assert_array_equal(found[0][row], values)
        np.testing.assert_array_equal(found[1][row], found[0][row])
    for row, values in trained.items():
        np.testing.assert_array_equal(reset[row], values)
        assert np.abs(values - of_copy[row]).max() > 0
    copied, num_trained, num_gradients, state = sizes
    assert copied == num_trained == num_gradients
    # In fp32 the master weights are the parameters: these and two moments.
    assert state == 3 * num_trained


def test_the_merged_export_gives_the_unmerged_log_probs(expected_of: Any) -> None:
    """The merged model on transformers, in float64, and the bits of every layout."""
    expected = expected_of("qwen3", LORA_TARGETS)

    def export(_rank: int, world: int, **options: Any) -> dict[str, np.ndarray]:
        policy = adapted_policy(expected, world, **options)
        return {name: tensor.clone().numpy() for name, tensor in policy.export_weights()}

    whole = run_ranks(export, 1)[0]
    split = run_ranks(lambda rank, world: export(rank, world, tp=2), 2)[1]
    for name, values in whole.items():
        np.testing.assert_array_equal(split[name], values, err_msg=name)

    trainer = PlainTrainer(expected.folder, dtype=torch.float64)
    state = {name: torch.from_numpy(values).double() for name, values in whole.items()}
    trainer.model.load_state_dict(state)
    for row, logprobs in enumerate(trainer.logprobs(*STEPS[0])):
        np.testing.assert_allclose(logprobs.numpy(), expected.logprobs[row], atol=2e-5)


def test_the_first_values_do_not_depend_on_the_layout(expected_of: Any) -> None:
    """As PEFT: A is uniform in 1 / sqrt(inputs), B is 0."""
    expected = expected_of("qwen3", LORA_TARGETS)

    def start(_rank: int, world: int, **options: Any) -> dict[str, np.ndarray]:
        policy = make_policy(expected.folder, world, lora=expected.options, **options)
        return {name: tensor.clone().numpy() for name, tensor in policy.export_adapters()}

    whole = run_ranks(start, 1)[0]
    split = run_ranks(lambda rank, world: start(rank, world, tp=2), 2)[0]
    for name, values in whole.items():
        np.testing.assert_array_equal(split[name], values, err_msg=name)
        if "lora_B" in name:
            assert not values.any()
            continue
        bound = 1 / values.shape[1] ** 0.5
        assert 0.8 * bound < np.abs(values).max() <= bound
        assert abs(values.std() - bound / 3**0.5) < 0.15 * bound
    assert len({values.tobytes() for name, values in whole.items() if "lora_A" in name}) == 14
