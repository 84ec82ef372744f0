"""Errors in the passes before an update: frozen reference, log-probs of the start, experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.policies.injected_errors.injection import (
    FOUR_UPDATES,
    FROZEN,
    GRPO,
    POLICY,
    SAMPLER_ROUTES,
    TEMPERATURE,
    TRAINING,
    InjectedError,
    does_nothing,
)


def _high_logprobs(original: Any, minibatch: Any, logprobs: Any, *args: Any) -> Any:
    raised = {name: column + 1e-3 for name, column in logprobs.columns.items()}
    return original(minibatch, replace(logprobs, columns=raised), *args)


def _present_start(original: Any, run: Any, step: Any, minibatch: Any, inputs: Any) -> Any:
    """The log-probs of the step's start are computed again before each update."""
    if minibatch.index and minibatch.step_start_logprobs is not None:
        present = run.policy.logprobs(minibatch, "step_start")
        minibatch = replace(minibatch, step_start_logprobs=present)
    return original(run, step, minibatch, inputs)


def _start_at_temperature_1(
    original: Any, self: Any, minibatch: Any, source: Any, *args: Any
) -> Any:
    if source != "step_start":
        return original(self, minibatch, source, *args)
    before = [model.temperature for model in self.models]
    for model in self.models:
        model.temperature = 1.0
    try:
        return original(self, minibatch, source, *args)
    finally:
        for model, temperature in zip(self.models, before, strict=True):
            model.temperature = temperature


def _without_reset(original: Any, self: Any, **options: Any) -> Any:
    """Only the first reference is taken; later resets reset the moments."""
    if self.reference:
        self.optimizer.reset_moments()
        return None
    return original(self, **options)


def _without_given_routes(original: Any, self: Any, spec: Any, models: Any, _given: Any) -> None:
    original(self, spec, models, None)


def _one_token_late(original: Any, self: Any, position: int) -> Any:
    return np.roll(original(self, position), 1, axis=0)


def _of_next_sample(original: Any, minibatch: Any, *args: Any) -> Any:
    """Each sample with the experts of the next one, cut or repeated to its own length."""
    minibatch = original(minibatch, *args)
    if minibatch.routes is None:
        return minibatch
    rows = sorted(minibatch.routes)
    next_rows = dict(zip(rows, rows[1:] + rows[:1], strict=True))
    routes = {}
    for row in rows:
        shape = minibatch.routes[row].shape
        routes[row] = np.resize(minibatch.routes[next_rows[row]], shape)
    return replace(minibatch, routes=routes)


def _without_first_microbatch(original: Any, self: Any, entropies: Any) -> Any:
    return original(self, entropies[1:] or entropies)


PASS_ERRORS: dict[str, InjectedError] = {
    "reference pass with the policy's weights": InjectedError(
        target=f"{POLICY}.weights.Snapshot._swap", change=does_nothing, changes=FROZEN
    ),
    "the reference is never reset": InjectedError(
        target=f"{POLICY}.engine.MegatronPolicy.take_reference",
        change=_without_reset,
        changes=FROZEN,
    ),
    "log-probs of the step's start 0.001 high": InjectedError(
        target=f"{TRAINING}.step.with_logprobs", change=_high_logprobs
    ),
    "step-start log-probs of the update's weights": InjectedError(
        target=f"{TRAINING}.step.update", change=_present_start, changes=GRPO | FOUR_UPDATES
    ),
    "step-start pass at temperature 1": InjectedError(
        target=f"{POLICY}.engine.MegatronPolicy.logprobs",
        change=_start_at_temperature_1,
        changes=TEMPERATURE,
    ),
    "the entropy of the step's start leaves samples out": InjectedError(
        target=f"{POLICY}.engine.MegatronPolicy._sum_entropies",
        change=_without_first_microbatch,
        changes={"logging": {"step_start_entropy": True}},
    ),
    "later updates choose their own experts": InjectedError(
        target=f"{POLICY}.routing.Routing.__init__",
        change=_without_given_routes,
        changes=FOUR_UPDATES,
        family="qwen3_moe",
    ),
    "the sampler's experts are not replayed": InjectedError(
        target=f"{POLICY}.routing.Routing.__init__",
        change=_without_given_routes,
        changes=SAMPLER_ROUTES,
        family="qwen3_moe",
    ),
    "the sampler's experts are one token late": InjectedError(
        target="pacs_megatron.contracts.step_data.TokenBuffers.routes_of",
        change=_one_token_late,
        changes=SAMPLER_ROUTES,
        family="qwen3_moe",
    ),
    "each sample has the experts of the next one": InjectedError(
        target=f"{TRAINING}.step.with_logprobs",
        change=_of_next_sample,
        changes=SAMPLER_ROUTES,
        family="qwen3_moe",
    ),
}
