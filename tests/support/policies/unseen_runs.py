"""Combinations of family, layout, objective, options and data that no other case has, each with a
resume in a neighbouring layout and some with other options from there on; written before their
first run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacs_megatron.workbench.certify import run as certify_run
from pacs_megatron.workbench.certify import samples, shrink
from pacs_megatron.workbench.certify.shrink import Case
from tests.support.policies.changed_runs import COSINE, Changed
from tests.support.policies.injected_errors.injection import SAMPLER_ROUTES

WARM: dict[str, Any] = {
    "schedule": "cosine",
    "min_lr": 2e-7,
    "warmup_updates": 3,
    "weight_decay": 0.1,
}
FULL: dict[str, Any] = {"recompute": {"granularity": "full"}}


def one_group(patch: pytest.MonkeyPatch) -> None:
    """Each step has one group."""
    patch.setattr(shrink, "missing_of_groups", lambda _step, _updates: [0])


def one_token(patch: pytest.MonkeyPatch) -> None:
    """Every prompt and every response has one token."""
    patch.setattr(shrink, "PROMPT", 1)
    patch.setattr(shrink, "RESPONSE", 1)


def one_group_of_single_tokens(patch: pytest.MonkeyPatch) -> None:
    one_group(patch)
    one_token(patch)


def one_class(patch: pytest.MonkeyPatch) -> None:
    """Every sample of an odd step is correct, of an even one wrong, with equal rewards in each
    group.
    """
    write = samples.write_samples

    def changed(case: Case, folder: Path, seed: int) -> None:
        write(case, folder, seed)
        arrays = dict(np.load(folder / "steps.npz"))
        for step in json.loads((folder / "case.json").read_text())["ids"]:
            arrays[f"{step}.labels"][:] = int(step) % 2
            arrays[f"{step}.rewards"] = arrays[f"{step}.labels"].copy()
        np.savez(folder / "steps.npz", **arrays)

    patch.setattr(certify_run, "write_samples", changed)


def case(
    objective: dict[str, Any],
    parallel: dict[str, Any] | None = None,
    ranks: int = 2,
    **options: Any,
) -> Changed:
    """`updates`, `epochs`, `samples`, `tokens` and `groups` of the batch; `later`, `family`, `data`
    as Changed.
    """
    names = {
        "updates": "updates_per_step",
        "epochs": "epochs",
        "samples": "samples_per_prompt",
        "tokens": "tokens_per_microbatch",
        "groups": "groups",
    }
    before: dict[str, Any] = {
        "run": {"nproc": ranks},
        "parallel": parallel or {},
        "objective": {"clip_grad": 1.0} | objective,
        "batch": {name: options[key] for key, name in names.items() if key in options},
        "optimizer": options.get("optimizer", {}),
    }
    routed = SAMPLER_ROUTES if options.get("is_routed") else {}
    kept = {key: options[key] for key in ("family", "clip", "stop_after", "data") if key in options}
    return Changed(before=before | routed, later=options.get("later", {}), **kept)


COMBINATIONS: dict[str, Changed] = {
    "pacs, frozen and reset inside the resume, experts, pp2 cp2 ep2, two epochs": case(
        {"name": "pacs", "reference": "frozen", "reset_every": 2, "importance_cap": 1.1},
        {"pp": 2, "cp": 2, "ep": 2},
        4,
        family="qwen3_moe",
        updates=4,
        epochs=2,
        optimizer=WARM,
        is_routed=True,
        later={"objective": {"beta": 0.3}},
    ),
    "ppo, experts, tp2 ep2, distributed optimizer, masked importance, entropy, two epochs": case(
        {
            "name": "ppo",
            "importance": "mask",
            "importance_level": "sequence",
            "entropy_coef": 0.01,
            "gamma": 0.97,
            "lam": 0.9,
        },
        {"tp": 2, "ep": 2, "sequence_parallel": True, "distributed_optimizer": True},
        family="qwen3_moe",
        epochs=2,
        optimizer=WARM,
    ),
    "grpo, replayed experts, four updates and two epochs, ep2": case(
        {"name": "grpo", "kl_coef": 0.1, "kl_estimator": "k3", "loss_mean": "sequence"},
        {"ep": 2},
        4,
        family="qwen3_moe",
        updates=4,
        epochs=2,
        is_routed=True,
    ),
    "grpo, the reference is reset after every step, llama, pp2 vpp2": case(
        {"name": "grpo", "kl_coef": 0.3, "reset_every": 1, "importance": "truncate"},
        {"pp": 2, "vpp": 2} | FULL,
        family="llama",
        updates=3,
        optimizer=WARM,
        later={"objective": {"kl_coef": 0.1, "clip_high": 0.015}, "optimizer": {"lr": 5e-4}},
    ),
    "pacs on single tokens, mean_log_prob, cp2": case(
        {"name": "pacs", "reward_proxy": "mean_log_prob", "score": "dr_grpo"},
        {"cp": 2},
        data=one_token,
        updates=3,
    ),
    "grpo with one group a step, distributed optimizer": case(
        {"name": "grpo"}, {"distributed_optimizer": True}, data=one_group, updates=2, epochs=2
    ),
    "pacs, one class a step, frozen reference, importance cap, tp2": case(
        {
            "name": "pacs",
            "reference": "frozen",
            "importance_cap": 1.05,
            "weighting": "only_positive",
        },
        {"tp": 2, "sequence_parallel": True},
        data=one_class,
        optimizer=COSINE,
    ),
    "real, one class a step, pp2": case(
        {"name": "real"}, {"pp": 2}, data=one_class, updates=2, epochs=2
    ),
    "psr, one class a step, decay": case(
        {"name": "w_reinforce", "classes": "positive"}, data=one_class, updates=2, optimizer=WARM
    ),
    "grpo, one class a step, entropy bonus, tied odd vocabulary": case(
        {"name": "grpo", "entropy_coef": 0.02},
        {"tp": 2},
        family="qwen3-tied-mha-odd-vocabulary",
        data=one_class,
        updates=2,
    ),
    "reinforce_pp with group baseline and KL in the reward, tied, pp4": case(
        {
            "name": "reinforce_pp",
            "baseline": "group",
            "kl_coef": 0.1,
            "kl_in": "reward",
            "kl_estimator": "k2",
        },
        {"pp": 4},
        4,
        family="qwen3-tied-mha-odd-vocabulary",
        updates=3,
        epochs=2,
        optimizer=WARM,
    ),
    "cispo with truncated sequence importance, tied, tp2 pp2": case(
        {
            "name": "cispo",
            "importance": "truncate",
            "importance_level": "sequence",
            "clip_high": 0.3,
        },
        {"tp": 2, "pp": 2, "sequence_parallel": True},
        4,
        family="qwen3-tied-mha-odd-vocabulary",
        updates=4,
        later={"objective": {"importance": "mask", "importance_floor": 0.7, "importance_cap": 1.5}},
    ),
    "rloo with KL in the reward, tp2 cp2, from four updates to one": case(
        {"name": "rloo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
        {"tp": 2, "cp": 2},
        4,
        updates=4,
        optimizer=COSINE,
        later={"batch": {"updates_per_step": 1}},
        stop_after=7,
    ),
    "luspo, pp2 cp2, from two epochs to one": case(
        {"name": "luspo", "kl_coef": 0.05, "kl_estimator": "k2"},
        {"pp": 2, "cp": 2},
        4,
        updates=2,
        epochs=2,
        optimizer=COSINE,
        later={"batch": {"epochs": 1, "updates_per_step": 3}},
        stop_after=6,
    ),
    "gspo with sequence mask and entropy, dp4 distributed, two epochs": case(
        {
            "name": "gspo",
            "importance": "mask",
            "importance_level": "sequence",
            "entropy_coef": 0.02,
        },
        {"distributed_optimizer": True},
        4,
        samples=3,
        epochs=2,
        updates=2,
    ),
    "pacs with actor term, experts, pp2 ep2, groups apart then together": case(
        {
            "name": "pacs",
            "actor_term": 0.5,
            "actor_scope": "own",
            "importance_cap": 1.2,
            "score": "dr_grpo",
        },
        {"pp": 2, "ep": 2},
        4,
        family="qwen3_moe-tied-not-normalised",
        updates=1,
        groups="apart",
        later={
            "batch": {"groups": "together", "tokens_per_microbatch": 160},
            "objective": {"score": "naive"},
        },
    ),
    "ppo without value clip, lambda 0, KL in the loss and resets, pp2 vpp2": case(
        {
            "name": "ppo",
            "lam": 0.0,
            "gamma": 0.9,
            "value_clip": None,
            "loss_mean": "sequence",
            "kl_coef": 0.2,
            "kl_estimator": "k2",
            "reset_every": 1,
        },
        {"pp": 2, "vpp": 2},
        optimizer=WARM,
        later={"objective": {"lam": 1.0, "critic": {"lr": 1e-3}}},
    ),
    "sft by sequence, two epochs, tied, pp2, warm-up": case(
        {"name": "sft", "loss_mean": "sequence"},
        {"pp": 2},
        family="qwen2-tied-mqa",
        updates=3,
        epochs=2,
        optimizer=WARM,
    ),
    "real with one update and two epochs, groups apart, cp2": case(
        {"name": "real", "tau": 0.3}, {"cp": 2}, updates=1, epochs=2, groups="apart"
    ),
    "dr_grpo, tp4, two epochs then four updates": case(
        {"name": "dr_grpo", "constant_length": 100},
        {"tp": 4},
        4,
        family="llama-tied-mha",
        updates=1,
        epochs=2,
        optimizer=COSINE,
        later={"batch": {"updates_per_step": 3, "epochs": 1}, "optimizer": {"lr": 2e-3}},
        stop_after=4,
    ),
    "pacs naive, together, two epochs, mistral, dp2": case(
        {"name": "pacs", "score": "naive", "weighting": "none"},
        family="mistral",
        updates=2,
        epochs=2,
        groups="together",
        tokens=1600,
        clip=0.7,
    ),
    "real_bce on single tokens with one group, distributed optimizer, pp2": case(
        {"name": "real_bce"},
        {"pp": 2, "distributed_optimizer": True},
        4,
        data=one_group_of_single_tokens,
        updates=2,
        epochs=2,
    ),
    # Chosen after reading the code.
    "ppo with KL in the reward, tied, one KV head, pp2, recomputed, distributed optimizer": case(
        {
            "name": "ppo",
            "kl_coef": 0.1,
            "kl_in": "reward",
            "kl_estimator": "k1",
            "gamma": 0.95,
            "lam": 0.9,
        },
        {"pp": 2, "distributed_optimizer": True} | FULL,
        4,
        family="qwen2-tied-mqa",
        updates=3,
        epochs=2,
        optimizer=WARM,
        later={"objective": {"kl_coef": 0.3, "lam": 0.5, "loss_mean": "sequence"}},
    ),
    "ppo, replayed experts that are not normalised, pp2 ep2, recomputed": case(
        {"name": "ppo", "kl_coef": 0.2, "importance": "mask", "gamma": 0.9, "lam": 0.8},
        {"pp": 2, "ep": 2} | FULL,
        4,
        family="qwen3_moe-tied-not-normalised",
        updates=2,
        epochs=2,
        is_routed=True,
        later={"objective": {"gamma": 1.0, "critic": {"lr": 5e-4}}, "optimizer": {"lr": 2e-3}},
    ),
    "pacs, experts, tp2 ep2, two epochs, another packing inside a step": case(
        {"name": "pacs", "importance_cap": 1.1},
        {"tp": 2, "ep": 2, "sequence_parallel": True, "distributed_optimizer": True},
        4,
        family="qwen3_moe",
        updates=3,
        epochs=2,
        groups="auto",
        tokens=300,
        optimizer=COSINE,
        later={
            "batch": {"groups": "apart", "tokens_per_microbatch": 40},
            "objective": {"beta": 0.5},
        },
    ),
    "sft, experts, cp2 ep2, recomputed experts, no clipping": case(
        {"name": "sft", "loss_mean": "sequence", "clip_grad": 0.0},
        {"cp": 2, "ep": 2, "recompute": {"granularity": "selective", "modules": ["moe"]}},
        4,
        family="qwen3_moe-tied-not-normalised",
        updates=2,
        optimizer=WARM,
        later={"objective": {"loss_mean": "token"}},
    ),
    "real, tied, pp2 vpp2, two epochs, then groups together": case(
        {"name": "real", "tau": 0.4},
        {"pp": 2, "vpp": 2, "distributed_optimizer": True},
        4,
        family="qwen3-tied-mha-odd-vocabulary",
        updates=3,
        epochs=2,
        groups="apart",
        tokens=200,
        optimizer=WARM,
        later={
            "batch": {"groups": "auto", "tokens_per_microbatch": 100},
            "objective": {"tau": 1.5},
        },
    ),
    "pacs, experts, ep2, one group on one of two ranks, two epochs, recomputed": case(
        {"name": "pacs", "importance_cap": 1.2},
        {"ep": 2, "distributed_optimizer": True} | FULL,
        family="qwen3_moe",
        data=one_group,
        updates=2,
        epochs=2,
        groups="together",
        tokens=1600,
        optimizer=WARM,
    ),
    "w_reinforce, one sample a prompt, KL in the loss, pp2 cp2": case(
        {"name": "w_reinforce", "kl_coef": 0.1, "importance": "truncate"},
        {"pp": 2, "cp": 2},
        4,
        samples=1,
        updates=3,
        epochs=2,
        optimizer=COSINE,
        later={"objective": {"kl_coef": 0.02}, "batch": {"tokens_per_microbatch": 30}},
    ),
}
