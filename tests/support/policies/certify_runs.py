"""Configurations to certify: differences from BASE, random ones, shipped ones, examples."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.policies.objective_cases import OBJECTIVE_CASES
from tests.support.tiny_families import CASES, config_of

ROOT = Path(__file__).parents[3]
BASE: dict[str, Any] = {
    "run": {"name": "certified", "steps": 10, "nproc": 2},
    "precision": {"dtype": "fp32"},
    "parallel": {},
    "objective": {"name": "pacs"},
    "batch": {
        "prompts_per_step": 16,
        "samples_per_prompt": 4,
        "updates_per_step": 2,
        "tokens_per_microbatch": 200,
    },
    "rollout": {"engine": "embedded", "sampling": {"max_response_tokens": 100}},
    "reward": {"name": "math"},
    "data": {"train": {"path": "train.jsonl", "preset": "gsm8k"}, "max_prompt_tokens": 60},
    "optimizer": {"lr": 1e-6},
}


def write_run(folder: Path, changes: Mapping[str, Any], family: str = "qwen3") -> Path:
    """A run file with `changes` (section -> keys) for a model of CASES; returns its path."""
    kind, own = CASES[family]
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(
        json.dumps(config_of(kind, own | {"num_hidden_layers": 4}).to_dict())
    )
    tree = {name: dict(values) for name, values in BASE.items()} | {"model": {"path": str(model)}}
    for section, values in changes.items():
        is_other = "name" in values or "engine" in values
        tree[section] = dict(values) if is_other else tree.get(section, {}) | values
    if tree["objective"]["name"] == "sft":
        tree["rollout"] = {"engine": "demonstrations", "max_response_tokens": 100}
        del tree["reward"]
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def random_run(seed: int) -> tuple[str, dict[str, Any]]:
    """(model of CASES, changes) at random; not every draw is valid."""
    draw = random.Random(seed)
    family = draw.choice(
        [
            "qwen2",
            "qwen3",
            "qwen3",
            "qwen3-tied-mha-odd-vocabulary",
            "qwen3_moe",
            "llama",
            "mistral",
        ]
    )
    is_moe = family == "qwen3_moe"
    parallel: dict[str, Any] = {"distributed_optimizer": draw.random() < 0.5}
    for axis in draw.sample(
        ["tp", "pp", "cp", "ep"] if is_moe else ["tp", "pp", "cp"], draw.choice([0, 1, 1, 2])
    ):
        parallel[axis] = 2
    parallel["sequence_parallel"] = "tp" in parallel and (is_moe or draw.random() < 0.5)
    if "pp" in parallel and draw.random() < 0.4:
        parallel["vpp"] = 2
    parallel["recompute"] = {"granularity": draw.choice(["none", "none", "selective", "full"])}
    model = parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("cp", 1)
    name = draw.choice(["pacs", "pacs", "grpo", "grpo", "sft"])
    objective = {"pacs": _random_pacs, "grpo": _random_grpo, "sft": _random_sft}[name](draw)
    one_update = objective.get("actor_term", 0) > 0
    changes: dict[str, Any] = {
        "run": {"nproc": model * (2 if "ep" in parallel and model < 2 else draw.choice([1, 2]))},
        "parallel": parallel,
        "objective": objective,
        "batch": {
            "updates_per_step": 1 if one_update else draw.choice([1, 2, 3, 4]),
            "samples_per_prompt": draw.choice([2, 3, 4, 8]),
            "tokens_per_microbatch": draw.choice([160, 200, 400, 1600]),
        },
        "optimizer": {
            "schedule": draw.choice(["constant", "linear", "cosine"]),
            "min_lr": draw.choice([0.0, 2e-7]),
            "warmup_updates": draw.choice([0, 0, 2, 5]),
            "weight_decay": draw.choice([0.0, 0.1]),
            "adam_beta2": draw.choice([0.95, 0.99]),
        },
    }
    if changes["optimizer"]["schedule"] == "constant":
        del changes["optimizer"]["min_lr"]
    if name == "pacs" and draw.random() < 0.3:
        changes["batch"]["groups"] = "apart"
    if name != "sft":
        sampling = {"max_response_tokens": 100, "temperature": draw.choice([1.0, 1.0, 0.7])}
        changes["rollout"] = {"engine": "embedded", "sampling": sampling}
    return family, changes


def _random_pacs(draw: random.Random) -> dict[str, Any]:
    proxy = draw.choice(["sum_log_ratio", "sum_log_ratio", "mean_log_prob"])
    options: dict[str, Any] = {
        "name": "pacs",
        "beta": draw.choice([1.0, 0.3]),
        "reward_proxy": proxy,
        "score": draw.choice(["rloo", "rloo", "dr_grpo", "grpo", "naive"]),
        "weighting": draw.choice(
            ["question", "question", "only_positive", "only_negative", "none"]
        ),
    }
    if proxy == "sum_log_ratio":
        options["reference"] = draw.choice(["step_start", "frozen"])
        if options["reference"] == "frozen" and draw.random() < 0.5:
            options["reset_every"] = 3
        if draw.random() < 0.2:
            options |= {"actor_term": 0.5, "actor_scope": draw.choice(["group", "own"])}
    if options["score"] == "grpo":
        options["score_std_floor"] = 0.1
    if draw.random() < 0.3:
        options["importance_cap"] = draw.choice([1.05, 2.0])
    return options | ({"clip_grad": 1.0} if draw.random() < 0.3 else {})


def _random_grpo(draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "name": "grpo",
        "clip_high": draw.choice([0.2, 0.28]),
        "loss_mean": draw.choice(["token", "sequence", "dr_grpo"]),
        "kl_coef": draw.choice([0.0, 0.0, 0.1]),
        "importance": draw.choice(["none", "truncate", "mask"]),
    }
    if options["loss_mean"] == "dr_grpo":
        options["constant_length"] = 100
    if options["kl_coef"] and draw.random() < 0.5:
        options["reset_every"] = 2
    return options


def _random_sft(draw: random.Random) -> dict[str, Any]:
    return {"name": "sft", "loss_mean": draw.choice(["token", "sequence"])}


_COSINE = {"schedule": "cosine", "min_lr": 2e-7, "warmup_updates": 2, "weight_decay": 0.1}
_FULL = {"recompute": {"granularity": "full"}}
UNSEEN: dict[str, tuple[str, dict[str, Any]]] = {
    "dapo, llama, pp2 vpp2": (
        "llama",
        {
            "run": {"nproc": 4},
            "parallel": {"pp": 2, "vpp": 2},
            "objective": {
                "name": "dapo",
                "overlong_length": 90,
                "overlong_buffer": 40,
                "importance": "truncate",
            },
            "batch": {"updates_per_step": 3},
            "optimizer": _COSINE,
        },
    ),
    "gspo, qwen2 with one key-value head, cp2 dp2": (
        "qwen2-tied-mqa",
        {
            "run": {"nproc": 4},
            "parallel": {"cp": 2, "distributed_optimizer": True},
            "objective": {"name": "gspo", "kl_coef": 0.05, "importance": "mask"},
            "batch": {"updates_per_step": 4, "samples_per_prompt": 3},
        },
    ),
    "ppo, mistral, dp2 with its own part of the state": (
        "mistral",
        {
            "parallel": {"distributed_optimizer": True},
            "objective": {
                "name": "ppo",
                "value_clip": 0.1,
                "lam": 0.95,
                "gamma": 0.99,
                "clip_grad": 1.0,
            },
            "optimizer": _COSINE,
        },
    ),
    "pacs with a frozen reference and std floor, experts, tp2 ep2": (
        "qwen3_moe",
        {
            "parallel": {"tp": 2, "ep": 2, "sequence_parallel": True} | _FULL,
            "objective": {
                "name": "pacs",
                "reference": "frozen",
                "reset_every": 2,
                "score": "grpo",
                "score_std_floor": 0.2,
                "importance_cap": 1.1,
            },
            "batch": {"updates_per_step": 4, "tokens_per_microbatch": 400},
        },
    ),
    "real_bce, tied with an odd vocabulary, pp2 cp2": (
        "qwen3-tied-mha-odd-vocabulary",
        {
            "run": {"nproc": 4},
            "parallel": {"pp": 2, "cp": 2},
            "objective": {"name": "real_bce"},
            "optimizer": _COSINE,
        },
    ),
    "w_reinforce, tied llama, tp2, recomputed, at temperature 0.7": (
        "llama-tied-mha",
        {
            "parallel": {"tp": 2, "sequence_parallel": True} | _FULL,
            "objective": {"name": "w_reinforce"},
            "batch": {"updates_per_step": 3, "samples_per_prompt": 8},
            "rollout": {
                "engine": "embedded",
                "sampling": {"max_response_tokens": 100, "temperature": 0.7},
            },
        },
    ),
    "cispo, experts that are not normalised, pp2 ep2": (
        "qwen3_moe-tied-not-normalised",
        {
            "run": {"nproc": 4},
            "parallel": {"pp": 2, "ep": 2, "distributed_optimizer": True},
            "objective": {"name": "cispo", "clip_grad": 0.5},
            "batch": {"updates_per_step": 4},
        },
    ),
    "rloo with the KL in the reward, padded vocabulary, tp2 cp2": (
        "qwen3-padded-already",
        {
            "run": {"nproc": 4},
            "parallel": {"tp": 2, "cp": 2},
            "objective": {"name": "rloo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
            "optimizer": {"adam_beta2": 0.95, "weight_decay": 0.1},
        },
    ),
    "pacs with mean_log_prob, mistral, pp4": (
        "mistral",
        {
            "run": {"nproc": 4},
            "parallel": {"pp": 4},
            "objective": {
                "name": "pacs",
                "reward_proxy": "mean_log_prob",
                "score": "dr_grpo",
                "beta": 0.3,
            },
            "batch": {
                "updates_per_step": 3,
                "samples_per_prompt": 2,
                "tokens_per_microbatch": 1600,
            },
            "optimizer": _COSINE,
        },
    ),
    "luspo with entropy and k2, biases, tp2 pp2": (
        "qwen2",
        {
            "run": {"nproc": 4},
            "parallel": {"tp": 2, "pp": 2},
            "objective": {
                "name": "luspo",
                "kl_coef": 0.1,
                "kl_estimator": "k2",
                "entropy_coef": 0.01,
            },
            "batch": {"updates_per_step": 2, "tokens_per_microbatch": 160},
        },
    ),
}
"""Layout, family, objective, precision of the state, packing and options that no other case
combines
"""

_CLIPPED: dict[str, Any] = {"name": "grpo", "clip_grad": 0.01}
"""Every gradient is clipped, so a wrong norm is a wrong update."""
UPSTREAM: dict[str, tuple[str, dict[str, Any]]] = {
    "finding 8's kind: biases of heads in the norm, tp2": (
        "qwen2",
        {"parallel": {"tp": 2}, "objective": _CLIPPED},
    ),
    "finding 9: masks of uneven length, cp2": (
        "qwen3",
        {
            "run": {"nproc": 4},
            "parallel": {"cp": 2},
            "objective": {"name": "grpo", "kl_coef": 0.1},
            "batch": {"tokens_per_microbatch": 160},
        },
    ),
    "finding 11's kind: a norm of heads, tp2 without sequence parallelism": (
        "qwen3",
        {"parallel": {"tp": 2, "distributed_optimizer": True}, "objective": _CLIPPED},
    ),
    "pull request 5916: the norm of experts, tp2 ep2": (
        "qwen3_moe",
        {
            "run": {"nproc": 4},
            "parallel": {"tp": 2, "ep": 2, "sequence_parallel": True},
            "objective": _CLIPPED,
        },
    ),
}
"""The part that our options reach of Megatron-LM's issue 7452, a list of errors where axes of
parallelism meet (docs/certify.md), and of its pull request 5916
"""

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "dp2": {},
    "cp2": {"cp": 2},
    "ep2": {"ep": 2},
    "tp2-pp2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "optimizer2": {"distributed_optimizer": True},
}
TOKEN_BUDGETS = {"together": 700, "apart": 160}
"""Siblings in one micro-batch, or in several."""


def _objective_runs() -> dict[str, tuple[str, dict[str, Any]]]:
    runs = {}
    for case, options in _certified_cases().items():
        for layout, parallel in LAYOUTS.items():
            for groups, budget in TOKEN_BUDGETS.items():
                changes = {
                    "run": {"nproc": 4 if layout == "tp2-pp2" else 2},
                    "parallel": parallel,
                    "objective": options,
                    "batch": {"updates_per_step": 3, "tokens_per_microbatch": budget},
                }
                family = "qwen3_moe" if layout == "ep2" else "qwen3"
                runs[f"{case}, {layout}, {groups}"] = (family, changes)
    return runs


def _certified_cases() -> dict[str, dict[str, Any]]:
    """The cases of all objectives but PACS and SFT, with lengths for responses of 100 tokens."""
    lengths = {"overlong_length": 90, "overlong_buffer": 40, "constant_length": 100}
    ppo = {"name": "ppo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    ucas = {"name": "ucas", "logit_coef": 0.3}
    vimpo = {"name": "vimpo", "beta": 0.1, "actor_coef": 0.5, "lam": 0.9}
    others = {"ppo": ppo, "vimpo": vimpo, "ucas": ucas}
    cases = {}
    for case, options in (OBJECTIVE_CASES | others).items():
        used = {key: value for key, value in lengths.items() if key in options}
        cases[case] = options | used
    return cases


OBJECTIVE_RUNS = _objective_runs()
"""Every case in every layout, siblings together or apart"""


def full_tier_of_objective_runs() -> set[str]:
    """Every case once, in each layout in turn; the campaign has all OBJECTIVE_RUNS."""
    layouts = list(LAYOUTS)
    budgets = list(TOKEN_BUDGETS)
    names = set()
    for number, case in enumerate(_certified_cases()):
        layout = layouts[number % len(layouts)]
        groups = budgets[number // len(layouts) % len(budgets)]
        names.add(f"{case}, {layout}, {groups}")
    return names


SHIPPED = sorted(path.stem for path in (ROOT / "configs" / "runs").glob("*.yaml"))
"""Names of the shipped configurations"""
EXAMPLE_FOLDER = ROOT / "examples" / "objectives"
EXAMPLES: dict[str, list[str]] = {
    "gspo": ["objective.importance=truncate"],
    "rloo": ["objective.kl_coef=0.1", "objective.kl_in=reward", "objective.kl_estimator=k1"],
    "ppo": [
        "objective.kl_coef=0.1",
        "objective.kl_in=reward",
        "objective.kl_estimator=k1",
        "parallel.pp=2",
    ],
    "real": [],
    "dapo": [
        "objective.entropy_coef=0.01",
        "objective.importance=mask",
        "objective.importance_level=sequence",
    ],
    "luspo": ["objective.kl_coef=0.1", "objective.kl_estimator=k2"],
    "real_bce": ["parallel.tp=1", "parallel.pp=2"],
    "cispo": ["parallel.tp=1", "parallel.cp=2"],
    "grpo": [],
    "dr_grpo": [],
    "w_reinforce": [],
    "maxrl": [],
    "dgpo": ["parallel.tp=1", "parallel.cp=2"],
    "steer": [],
    "ucas": ["parallel.tp=2"],
    "vimpo": ["parallel.tp=1", "parallel.pp=2"],
    "distill": [],
    "psr": [],
    "nsr": [],
    "reinforce_pp": [],
    "reinforce_pp_baseline": [],
}
"""File in EXAMPLE_FOLDER -> overrides"""
