"""Options of every objective but PACS, PPO and SFT, for tests of formulas, updates and layouts."""

from __future__ import annotations

from typing import Any

OBJECTIVE_CASES: dict[str, dict[str, Any]] = {
    "grpo": {
        "name": "grpo",
        "clip_low": 0.02,
        "clip_high": 0.02,
        "loss_mean": "sequence",
        "kl_coef": 0.3,
    },
    "dapo": {
        "name": "dapo",
        "clip_low": 0.02,
        "clip_high": 0.03,
        "overlong_length": 13,
        "overlong_buffer": 6,
    },
    "dr_grpo": {
        "name": "dr_grpo",
        "constant_length": 13,
        "clip_low": 0.02,
        "clip_high": 0.02,
        "kl_coef": 0.1,
        "kl_estimator": "k3",
        "kl_in": "reward",
    },
    "gspo": {"name": "gspo"},
    "gspo-wide": {
        "name": "gspo",
        "clip_low": 0.02,
        "clip_high": 0.03,
        "kl_coef": 0.2,
        "kl_estimator": "k2",
    },
    "luspo": {
        "name": "luspo",
        "clip_low": 0.01,
        "clip_high": 0.01,
        "importance": "truncate",
        "importance_cap": 1.2,
    },
    "cispo": {"name": "cispo", "clip_high": 0.01, "entropy_coef": 0.05},
    "reinforce_pp": {
        "name": "reinforce_pp",
        "kl_coef": 0.1,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    "reinforce_pp-baseline": {
        "name": "reinforce_pp",
        "baseline": "group",
        "kl_coef": 0.1,
        "kl_estimator": "k2",
        "loss_mean": "dr_grpo",
        "constant_length": 13,
    },
    "rloo": {"name": "rloo", "kl_coef": 0.05, "kl_estimator": "k2", "kl_in": "reward"},
    "rloo-mask": {
        "name": "rloo",
        "importance": "mask",
        "importance_level": "sequence",
        "importance_cap": 3.0,
        "importance_floor": 0.3,
    },
    "w_reinforce": {
        "name": "w_reinforce",
        "importance": "truncate",
        "importance_level": "sequence",
    },
    "psr": {"name": "w_reinforce", "classes": "positive", "clip_high": 0.02},
    "psr-kl": {"name": "w_reinforce", "classes": "positive", "kl_coef": 0.2, "clip_high": 0.03},
    "nsr": {
        "name": "w_reinforce",
        "classes": "negative",
        "entropy_coef": 0.1,
        "importance": "mask",
        "importance_cap": 1.2,
        "importance_floor": 0.8,
    },
    "maxrl": {"name": "maxrl", "clip_low": 0.02, "clip_high": 0.02, "loss_mean": "sequence"},
    "dgpo": {"name": "dgpo", "clip_low": 0.02, "clip_high": 0.02, "difficulty_temperature": 0.5},
    "distill": {
        "name": "distill",
        "teacher": "teacher",
        "label_coef": 0.1,
        "clip_low": 0.02,
        "clip_high": 0.02,
    },
    "distill-labels": {
        "name": "distill",
        "teacher": "teacher",
        "label_coef": 0.3,
        "loss_mean": "sequence",
        "importance": "mask",
        "entropy_coef": 0.05,
    },
    "real": {"name": "real"},
    "real_bce": {"name": "real_bce", "tau": 0.3},
}
"""Case -> options; clips so narrow that they apply within three updates."""
