"""The step page, with its phases replaced: what happens around the updates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pacs_megatron.observability.metrics import MetricSums
from pacs_megatron.training import step as page
from pacs_megatron.training.progress import RunProgress


def test_a_reference_reset_also_resets_the_moments_and_the_schedule_counts_planned_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four steps whose groups were all filtered out, with a reset every two steps and three updates
    per step.
    """
    samples = SimpleNamespace(metrics={}, facts=None)
    for name, result in (
        ("collect", samples),
        ("poll", None),
        ("release_memory", None),
        ("cut", []),
        ("logprobs", ([], MetricSums())),
    ):
        monkeypatch.setattr(page, name, lambda *_, result=result: result)
    resets: list[dict[str, bool]] = []
    positions: list[int] = []
    run = SimpleNamespace(
        reset_every=2,
        config=SimpleNamespace(batch=SimpleNamespace(num_updates=3)),
        policy=SimpleNamespace(take_reference=lambda **options: resets.append(options)),
        models=[SimpleNamespace(optimizer=SimpleNamespace(advance_schedule=positions.append))],
    )
    for step in range(4):
        page.train_step(cast("Any", run), RunProgress(step=step))
    assert resets == [{"reset_optimizer": True}] * 2
    assert positions == [3, 6, 9, 12]
