"""A resume, with the files of the checkpoint replaced: positions, versions, generators."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pacs_megatron.training import saving
from pacs_megatron.training.progress import OpenStep


class Optimizer:
    """Records the positions of its schedule."""

    def __init__(self) -> None:
        self.positions: list[int] = []

    def advance_schedule(self, position: int) -> None:
        self.positions.append(position)


@pytest.mark.parametrize(
    ("step", "updates_in_step", "position"), [(0, 0, 0), (4, 0, 12), (4, 2, 14), (0, 1, 1)]
)
def test_a_resume_continues_schedules_weight_version_and_generators(
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    updates_in_step: int,
    position: int,
) -> None:
    """Three updates a step. The version differs from the position where steps had fewer groups."""
    saved = {"step": step, "row": None, "policy_version": 9, "has_reference": False}
    generators = {"cpu": object()}
    loaded: list[Any] = []
    for name, result in {
        "verify_checkpoint": None,
        "read_state": saved,
        "load_checkpoint": ({"dist": {}}, generators),
    }.items():
        monkeypatch.setattr(saving.run_checkpoint, name, lambda *_, result=result: result)
    for name, result in {
        "_newest_checkpoint": Path("checkpoints/step"),
        "_check_support": None,
        "_sharded": {},
        "_load_rollouts": None,
        "_read_open_step": OpenStep(updates=updates_in_step, logprobs=[]),
    }.items():
        monkeypatch.setattr(saving, name, lambda *_, result=result, **_options: result)
    monkeypatch.setattr(saving.policy_state, "load_sharded_state", lambda *_: None)
    monkeypatch.setattr(
        saving.policy_state, "load_rng_state", lambda state, _where: loaded.append(state)
    )

    models = [SimpleNamespace(optimizer=Optimizer(), version=0, reference=None)]
    run = SimpleNamespace(
        run_dir=Path("run"),
        rank=SimpleNamespace(rank=1),
        channel=None,
        policy=models[0],
        models=models,
        has_reference=False,
        lora_facts=None,
        config=SimpleNamespace(
            policy=SimpleNamespace(offload="none"), batch=SimpleNamespace(num_updates=3)
        ),
    )
    progress = saving.resume(cast("Any", run))
    assert progress is not None
    assert (progress.step, progress.open_step.updates) == (step, updates_in_step)
    assert models[0].optimizer.positions == [position]
    assert models[0].version == 9
    assert loaded == [generators]
