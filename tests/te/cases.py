"""One training case on any layout: log-probs, norms and weights of three updates, with a save and a
resume in between.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from tests.support.policies.policy_cases import (
    logprobs_by_row,
    make_part,
    make_policy,
    random_step,
    train,
)
from tests.support.tiny_families import make_family

TOKENS = 200
FULL = {"granularity": "full"}
SELECTIVE = {"granularity": "selective"}


@dataclass(frozen=True)
class Case:
    family: str
    world: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)


SP = {"tp": 2, "sequence_parallel": True}
FAMILIES = {
    "qwen3": "qwen3",
    "qwen3-tied": "qwen3-tied-mha-odd-vocabulary",
    "qwen2": "qwen2",
    "llama": "llama",
    "mistral": "mistral",
    "moe": "qwen3_moe",
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, SP),
    "tp2-sp-distopt": (2, SP | {"distributed_optimizer": True}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {}),
    "dp2-distopt": (2, {"distributed_optimizer": True}),
    "ep2-distopt": (2, {"ep": 2, "distributed_optimizer": True}),
    "tp2-ep2-sp": (2, SP | {"ep": 2}),
    "tp2-ep2-sp-distopt": (2, SP | {"ep": 2, "distributed_optimizer": True}),
    "recompute-full": (1, {"recompute": FULL}),
    "recompute-selective": (1, {"recompute": SELECTIVE}),
}
CASES = {}
for short, family in FAMILIES.items():
    for layout in LAYOUTS:
        is_moe = short == "moe"
        if "ep2" in layout and not is_moe:
            continue
        # Megatron needs sequence parallelism for experts with tensor parallelism.
        if layout == "tp2" and is_moe:
            continue
        CASES[f"{short}-{layout}"] = Case(family, *LAYOUTS[layout])
DISCARDED = {
    "qwen3-recompute-norms": Case(
        "qwen3", 2, SP | {"recompute": SELECTIVE | {"modules": ["layernorm"]}}
    ),
    "moe-recompute-act": Case(
        "qwen3_moe", 1, {"recompute": SELECTIVE | {"modules": ["layernorm", "moe_act"]}}
    ),
}
"""Recomputed by Transformer Engine only, and not with recipe delayed."""
CASES |= DISCARDED
"""Every family in every layout; `make test-te` runs some, the campaign all of them."""
FP8_SHAPE = {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 32}
"""FP8 needs multiples of 16 on every rank, in every layout; blockwise with sequence parallelism 128
for `hidden_size`.
"""
STEPS = [random_step(seed, vocab=90) for seed in range(3)]


@dataclass
class Outcome:
    """Of one rank; weights are the same on all of them."""

    before: dict[int, np.ndarray]
    norms: list[float]
    drift: list[float | None]
    weights: dict[str, np.ndarray]
    resumed_equal: bool
    """the third update after a save, two foreign updates and a load: the same bits"""
    optimizers: list[str]


def weights_of(policy: Any) -> dict[str, np.ndarray]:
    return {name: tensor.clone().float().cpu().numpy() for name, tensor in policy.export_weights()}


def save(policy: Any, folder: Path) -> None:
    from pacs_megatron.checkpoint.dist_files import prepare_sharded
    from pacs_megatron.policy import state

    if policy.rank.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier(group=policy.rank.control)
    wanted = state.sharded_state(policy, is_loading=False, with_reference=False)
    prepare_sharded(wanted, folder).write(folder)
    dist.barrier(group=policy.rank.control)


def load(policy: Any, folder: Path) -> None:
    from pacs_megatron.checkpoint.dist_files import load_sharded
    from pacs_megatron.policy import state

    wanted = state.sharded_state(policy, is_loading=True, with_reference=False)
    state.load_sharded_state(policy, load_sharded(wanted, folder))


def run_case(case: Case, model: Path, scratch: Path, world: int, **options: Any) -> Outcome:
    """On every rank of `run_ranks`. `options` go to `make_policy`: dtype, fp8."""
    from pacs_megatron.objectives.pacs import PacsOptions
    from pacs_megatron.objectives.registry import build_objective

    policy = make_policy(model, world, tokens_per_microbatch=TOKENS, **options, **case.parallel)
    objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
    before = logprobs_by_row(policy, make_part(*STEPS[0], policy, TOKENS))
    reports = train(policy, objective, STEPS[:2], tokens_per_microbatch=TOKENS)
    save(policy, scratch / "saved")
    reports += train(policy, objective, STEPS[2:], tokens_per_microbatch=TOKENS)
    weights = weights_of(policy)
    train(policy, objective, STEPS[:1], tokens_per_microbatch=TOKENS)
    load(policy, scratch / "saved")
    train(policy, objective, STEPS[2:], tokens_per_microbatch=TOKENS)
    again = weights_of(policy)
    return Outcome(
        before=before,
        norms=[report.grad_norm for report in reports],
        drift=[report.metrics.get("pacs/score_drift_max") for report in reports],
        weights=weights,
        resumed_equal=all(np.array_equal(weights[name], again[name]) for name in weights),
        optimizers=[type(part.optimizer).__name__ for part in policy.optimizer.optimizers()],
    )


def model_of(case: Case, folder: Path) -> Path:
    path = folder / case.family
    return path if path.exists() else make_family(path, case.family, **FP8_SHAPE)


def run(name: str, folder: Path, **options: Any) -> Outcome:
    """`CASES[name]` on its ranks; the outcome of rank 0 with the log-probs of all of them."""
    from tests.support.ranks import run_ranks

    case = CASES[name]
    model = model_of(case, folder)
    scratch = folder / f"scratch-{name}"
    outcomes = run_ranks(
        lambda _rank, world: run_case(case, model, scratch, world, **options),
        case.world,
        timeout=600,
    )
    for other in outcomes[1:]:
        outcomes[0].before.update(other.before)
    shutil.rmtree(scratch, ignore_errors=True)
    return outcomes[0]


def save_outcome(outcome: Outcome, path: Path) -> None:
    rows = {f"before.{row}": values for row, values in outcome.before.items()}
    weights = {f"weights.{name}": values for name, values in outcome.weights.items()}
    np.savez(
        path,
        norms=np.array(outcome.norms),
        resumed=np.array(outcome.resumed_equal),
        **rows,
        **weights,
    )
