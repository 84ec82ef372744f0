"""The configuration of a plan whose bytes are compared with a live model."""

from __future__ import annotations

from typing import Any

from pacs_megatron.config import RunConfig


def run_config(dtype: str, parallel: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "x", "steps": 1},
            "model": {"path": "x"},
            "precision": {"dtype": dtype},
            "parallel": parallel,
            "objective": {"name": "pacs"},
            "batch": {
                "prompts_per_step": 8,
                "samples_per_prompt": 2,
                "tokens_per_microbatch": 2048,
            },
            "rollout": {"engine": "embedded", "sampling": {"max_response_tokens": 1024}},
            "reward": {"name": "math"},
            "data": {"train": {"path": "x", "preset": "gsm8k"}},
            "optimizer": {"lr": 1e-6},
        }
    )
