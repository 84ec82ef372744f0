"""A policy that is trained, saved and continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pacs_megatron.checkpoint import run_checkpoint
from pacs_megatron.checkpoint.names import Position
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.parallel.control import ControlChannel
from tests.support.policies.policy_cases import random_step, train

STEPS = [random_step(seed) for seed in range(6)]
FROZEN = PacsOptions(name="pacs", reference="frozen")


def save(policy: Any, folder: Path, step: int, model: Path, keep_last: int = 2) -> Path:
    from pacs_megatron.policy import state

    contents = run_checkpoint.Contents(
        sharded={
            "dist": state.sharded_state(
                policy, is_loading=False, with_reference=policy.reference is not None
            )
        },
        state={"schedule": policy.optimizer.schedule.state_dict()},
        rng=state.rng_state(),
        hf_metadata=model,
        dtype=policy.config.params_dtype,
        buffer=None,
    )
    finish = run_checkpoint.start_checkpoint(
        folder, Position(step), policy.rank, contents, keep_last=keep_last
    )
    return finish(policy.rank)


def load(policy: Any, folder: Path, *, with_reference: bool = True) -> None:
    from pacs_megatron.policy import state

    checkpoint = run_checkpoint.latest_checkpoint(folder)
    assert checkpoint is not None
    run_checkpoint.verify_checkpoint(checkpoint, ControlChannel(policy.rank))
    if with_reference:
        policy.take_reference(reset_optimizer=False)
    sharded = state.sharded_state(policy, is_loading=True, with_reference=with_reference)
    filled, _ = run_checkpoint.load_checkpoint(checkpoint, policy.rank, {"dist": sharded})
    state.load_sharded_state(policy, filled["dist"])
    policy.optimizer.schedule.load_state_dict(
        json.loads((checkpoint / "state.json").read_text())["schedule"]
    )


def continued(policy: Any) -> dict[str, Any]:
    """Three more steps: losses (they depend on the reference), norms, final weights."""
    reports = train(policy, build_objective(FROZEN, updates_per_step=1), STEPS[3:])
    return {
        "loss": [r.metrics["objective/loss"] for r in reports],
        "norm": [r.grad_norm for r in reports],
        "weights": {
            name: tensor.float().numpy().copy() for name, tensor in policy.export_weights()
        },
    }
