"""Random legal options of every objective, for tests of formulas."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter

from pacs_megatron.objectives.registry import REGISTRY, ObjectiveOptions
from pacs_megatron.objectives.shared.base import CommonOptions

Draw = random.Random
NAMES = sorted(REGISTRY)


def random_options(seed: int) -> CommonOptions:
    """Options of objective number `seed` of NAMES, in turn."""
    draw = random.Random(seed)
    name = NAMES[seed % len(NAMES)]
    options: CommonOptions = TypeAdapter(ObjectiveOptions).validate_python(
        {"name": name} | _OF_OBJECTIVE.get(name, _clipped)(draw)
    )
    return options


def _pacs(draw: Draw) -> dict[str, Any]:
    options: dict[str, Any] = {
        "beta": draw.choice([0.1, 1.0, 2.0]),
        "reward_proxy": draw.choice(["sum_log_ratio", "sum_log_ratio", "mean_log_prob"]),
        "score": draw.choice(["rloo", "dr_grpo", "grpo", "naive"]),
        "weighting": draw.choice(["question", "only_positive", "only_negative", "none"]),
        "importance_cap": draw.choice([None, 1.1, 2.0]),
    }
    if options["score"] == "grpo":
        options["score_std_floor"] = draw.choice([0.01, 0.1, 5.0])
    if options["reward_proxy"] == "sum_log_ratio":
        options["reference"] = draw.choice(["step_start", "frozen"])
        if draw.random() < 0.3:
            options |= {"actor_term": 0.5, "actor_scope": draw.choice(["group", "own"])}
    return options


def _policy_gradient(draw: Draw) -> dict[str, Any]:
    options: dict[str, Any] = {
        "kl_coef": draw.choice([0.0, 0.01, 0.5]),
        "entropy_coef": draw.choice([0.0, 0.02, 0.5]),
        "importance": draw.choice(["none", "truncate", "mask"]),
        "clip_high": draw.choice([0.02, 0.05, 0.3]),
    }
    if options["kl_coef"]:
        options["kl_in"] = draw.choice(["loss", "reward"])
        estimators = ["k2", "k3"] if options["kl_in"] == "loss" else ["k1", "k2", "k3"]
        options["kl_estimator"] = draw.choice(estimators)
    if options["importance"] != "none":
        options["importance_level"] = draw.choice(["token", "sequence"])
        options["importance_cap"] = draw.choice([1.1, 2.0])
    return options


def _clipped(draw: Draw) -> dict[str, Any]:
    return _policy_gradient(draw) | {"clip_low": draw.choice([0.02, 0.05, 0.3])}


def _with_mean(draw: Draw, options: Mapping[str, Any]) -> dict[str, Any]:
    loss_mean = draw.choice(["token", "sequence", "dr_grpo"])
    of_mean = {"loss_mean": loss_mean}
    return {**options, **of_mean} | ({"constant_length": 7} if loss_mean == "dr_grpo" else {})


def _grpo(draw: Draw) -> dict[str, Any]:
    return _with_mean(draw, _clipped(draw))


def _dapo(draw: Draw) -> dict[str, Any]:
    options = _grpo(draw)
    if draw.random() < 0.7:
        options |= {"overlong_length": 8, "overlong_buffer": draw.choice([2, 5])}
        options["overlong_penalty"] = draw.choice([0.5, 1.0])
    return options


def _dr_grpo(draw: Draw) -> dict[str, Any]:
    return _clipped(draw) | {"constant_length": draw.choice([7, 100])}


def _sequence_ratio(draw: Draw) -> dict[str, Any]:
    """GSPO and LUSPO allow narrow clips only."""
    ranges = {
        "clip_low": draw.choice([3e-4, 0.02, 0.05]),
        "clip_high": draw.choice([4e-4, 0.02, 0.05]),
    }
    return _clipped(draw) | ranges


def _cispo(draw: Draw) -> dict[str, Any]:
    options = _with_mean(draw, _policy_gradient(draw))
    return options | {"clip_high": draw.choice([0.02, 4.0])}


def _reinforce_pp(draw: Draw) -> dict[str, Any]:
    return _grpo(draw) | {"baseline": draw.choice(["none", "group"])}


def _w_reinforce(draw: Draw) -> dict[str, Any]:
    options = _clipped(draw) | {"classes": draw.choice(["both", "positive", "negative"])}
    if options["classes"] == "both":
        options["positive_weight"] = draw.choice([0.1, 0.7])
    if options.get("kl_in") == "reward":
        options |= {"kl_in": "loss", "kl_estimator": "k3"}
    return options


def _maxrl(draw: Draw) -> dict[str, Any]:
    options = _grpo(draw)
    if options.get("kl_in") == "reward":
        options |= {"kl_in": "loss", "kl_estimator": "k3"}
    return options


def _dgpo(draw: Draw) -> dict[str, Any]:
    return _grpo(draw) | {"difficulty_temperature": draw.choice([None, 0.3, 2.0])}


def _distill(draw: Draw) -> dict[str, Any]:
    options = _grpo(draw) | {"teacher": "teacher", "label_coef": draw.choice([0.0, 0.3, 2.0])}
    for key in ("kl_coef", "kl_in", "kl_estimator"):
        options.pop(key, None)
    return options


def _steer(draw: Draw) -> dict[str, Any]:
    bounds = {"weight_min": draw.choice([0.1, 0.8]), "ratio_max": draw.choice([1.01, 10.0])}
    return _grpo(draw) | bounds


def _vimpo(draw: Draw) -> dict[str, Any]:
    options = _distill(draw)
    del options["teacher"], options["label_coef"]
    return options | {
        "beta": draw.choice([5e-4, 0.1]),
        "actor_coef": draw.choice([0.0, 0.005, 1.0]),
        "value_kl": draw.choice(["k2", "k3"]),
        "ratio_max": draw.choice([1.01, 10.0]),
    }


def _ucas(draw: Draw) -> dict[str, Any]:
    coefs = {"correct_coef": draw.choice([0.0, 0.25]), "wrong_coef": draw.choice([0.35, 1.0])}
    return _grpo(draw) | coefs | {"logit_coef": draw.choice([0.0, 0.05, 1.0])}


def _ppo(draw: Draw) -> dict[str, Any]:
    options = _grpo(draw)
    if options.get("kl_in") == "reward":
        options["kl_estimator"] = "k1"
    return options | {
        "value_clip": draw.choice([None, 0.05, 0.5]),
        "value_coef": draw.choice([0.5, 1.0]),
    }


def _real(draw: Draw) -> dict[str, Any]:
    return {"tau": draw.choice([0.1, 0.5, 2.0])}


def _sft(draw: Draw) -> dict[str, Any]:
    return {"loss_mean": draw.choice(["token", "sequence"])}


_OF_OBJECTIVE: dict[str, Callable[[Draw], dict[str, Any]]] = {
    "pacs": _pacs,
    "grpo": _grpo,
    "dapo": _dapo,
    "dr_grpo": _dr_grpo,
    "gspo": _sequence_ratio,
    "luspo": _sequence_ratio,
    "cispo": _cispo,
    "reinforce_pp": _reinforce_pp,
    "w_reinforce": _w_reinforce,
    "maxrl": _maxrl,
    "dgpo": _dgpo,
    "distill": _distill,
    "steer": _steer,
    "vimpo": _vimpo,
    "ucas": _ucas,
    "ppo": _ppo,
    "real": _real,
    "real_bce": _real,
    "sft": _sft,
}
