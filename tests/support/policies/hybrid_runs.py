"""Certificates of hybrids: every layout with every objective. A step has two updates, and the
second attempt resumes in another layout.
"""

from __future__ import annotations

import itertools
from typing import Any

_SHARDED = {"distributed_optimizer": True}
_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2 without sp": (2, {"tp": 2, "sequence_parallel": False}),
    "pp2": (2, {"pp": 2}),
    "vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2 ep2": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "dp2": (2, {}),
    "dp2 sharded": (2, _SHARDED),
    "recompute full": (1, {"recompute": {"granularity": "full"}}),
    "recompute selective": (1, {"recompute": {"granularity": "selective"}}),
}
"""name -> (ranks, parallel options)"""
_OBJECTIVES: dict[str, dict[str, Any]] = {
    "pacs": {"name": "pacs"},
    "grpo": {"name": "grpo", "kl_coef": 0.1},
    "ppo": {"name": "ppo"},
}


def _family(layout: str, objective: str) -> str:
    """A case of tiny_families.py: with experts where ranks share them. Of the Qwen3.5 text models
    transformers has no critic.
    """
    if objective == "ppo":
        return "qwen3_next"
    if "ep2" in layout:
        return "qwen3_5_moe"
    return "qwen3_5"


def _runs() -> dict[str, tuple[str, dict[str, Any]]]:
    runs = {}
    for layout, objective in itertools.product(_LAYOUTS, _OBJECTIVES):
        if (layout, objective) == ("tp2 without sp", "ppo"):
            continue  # experts require sequence parallelism
        num_ranks, parallel = _LAYOUTS[layout]
        changes = {
            "run": {"nproc": num_ranks},
            "parallel": parallel,
            "objective": _OBJECTIVES[objective],
        }
        runs[f"{layout}, {objective}"] = _family(layout, objective), changes
    return runs


HYBRID_RUNS = _runs()
"""name -> (model of CASES, changes)"""
