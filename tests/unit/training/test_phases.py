"""The log-prob passes of a step, with the model replaced."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.training.phases import logprobs


class Policy:
    """Counts its passes. Mini-batch k has 10 (k + 1) tokens with an entropy of k + 1 nats each."""

    def __init__(self, *, measures_entropy: bool) -> None:
        self.measures_entropy = measures_entropy
        self.certainty: dict[str, torch.Tensor] = {}
        self.step_start_entropy = (0.0, 0.0)
        self.routes: dict[int, Any] | None = {0: "experts"}
        self.passes: list[tuple[int, str]] = []

    def logprobs(self, minibatch: Any, source: str, _should_stop: Any) -> torch.Tensor:
        self.passes.append((minibatch.index, source))
        if self.measures_entropy and source == "step_start":
            number = minibatch.index + 1
            self.step_start_entropy = (10.0 * number * number, 10.0 * number)
        return torch.zeros(1)


@pytest.mark.parametrize("measures_entropy", [False, True])
def test_entropy_takes_a_pass_only_where_the_objective_has_none(measures_entropy: bool) -> None:
    """The first update gets no log-probs of that pass, so it skips the samples that it skipped
    without it.
    """
    policy = Policy(measures_entropy=measures_entropy)
    run = SimpleNamespace(
        policy=policy,
        models=[policy],
        objective=build_objective(PacsOptions(name="pacs"), updates_per_step=3),
        stop=SimpleNamespace(is_set=lambda: False),
        timer=SimpleNamespace(span=lambda _name: nullcontext()),
        config=SimpleNamespace(batch=SimpleNamespace(updates_of=lambda index: [index])),
    )
    tokens = SimpleNamespace(index=np.arange(1), response_offsets=np.arange(2))
    minibatches = [SimpleNamespace(index=index, routes=None, tokens=tokens) for index in range(3)]
    by_minibatch, metrics = logprobs(cast("Any", run), cast("Any", minibatches))
    found = [(set(one.columns), one.routes) for one in by_minibatch]
    with_pass = ({"step_start"}, policy.routes)
    assert found == [(set(), None), with_pass, with_pass]
    later = [(1, "step_start"), (2, "step_start")]
    if not measures_entropy:
        assert policy.passes == later and metrics.values() == {}
        return
    assert policy.passes == [(0, "step_start"), *later]
    mean = (1 * 10 + 2 * 20 + 3 * 30) / 60
    assert metrics.values() == {"policy/entropy_step_start": pytest.approx(mean)}
    assert metrics.sums["policy/entropy_step_start"].count == 60
