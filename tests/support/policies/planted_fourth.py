"""A fourth round of planted errors for `certify`: experts of the sampler, and parts of a step that
no earlier round touches.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.policies.planted import (
    BATCHING,
    CLIPPED,
    GRPO,
    OBJECTIVES,
    POLICY,
    TEMPERATURE,
    Planted,
    _after_resume,
)

ROUTED: dict[str, Any] = {
    "policy": {"routing": "replay_sampler"},
    "rollout": {
        "engine": "sglang",
        "urls": ["http://127.0.0.1:1"],
        "dtype": "fp32",
        "sync": {"transport": "disk"},
        "sampling": {"max_response_tokens": 100},
    },
}
"""Recorded samples need no server."""
ENTROPY: dict[str, Any] = {"objective": {"name": "grpo", "entropy_coef": 0.01}}


def _one_token_late(original: Any, self: Any, position: int) -> Any:
    return np.roll(original(self, position), 1, axis=0)


def _of_neighbour(original: Any, minibatch: Any, found: Any) -> Any:
    """Each sample with the experts of the next one, cut or repeated to its own length."""
    minibatch = original(minibatch, found)
    if minibatch.routes is None:
        return minibatch
    rows = sorted(minibatch.routes)
    others = dict(zip(rows, rows[1:] + rows[:1], strict=True))
    routes = {
        row: np.resize(minibatch.routes[others[row]], minibatch.routes[row].shape) for row in rows
    }
    return replace(minibatch, routes=routes)


def _reference_replays(original: Any, self: Any, minibatch: Any, source: Any, *args: Any) -> Any:
    routing = self._routing
    self._routing = lambda given: routing(minibatch.routes if source == "reference" else given)
    try:
        if source != "reference":
            return original(self, minibatch, source, *args)
        with self.reference.swapped_in():
            return original(self, minibatch, "step_start", *args)
    finally:
        self._routing = routing


def _without_kl_gradient(original: Any, self: Any, tokens: Any) -> Any:
    return original(self, tokens).detach()


def _without_entropy_gradient(
    original: Any, batch: Any, logprobs: Any, entropy: Any, **options: Any
) -> Any:
    return original(batch, logprobs, None if entropy is None else entropy.detach(), **options)


def _short_means(original: Any, self: Any, values: Any) -> Any:
    """One token less in the divisor."""
    lens = self.all_response_lens[self.row_index].double()
    return original(self, values) * lens / (lens - 1).clamp(min=1)


def _without_single_tokens(original: Any, facts: Any, **options: Any) -> Any:
    plan = original(facts, **options)
    keep = facts.response_lens > 1
    return replace(
        plan, by_dp_rank=tuple(tuple(rows[keep[rows]] for rows in own) for own in plan.by_dp_rank)
    )


def _all_together(original: Any, minibatch: Any, objective: Any) -> Any:
    """Groups that are in several micro-batches count as whole."""
    minibatch = original(minibatch, objective)
    return replace(
        minibatch, plan=replace(minibatch.plan, together=np.ones_like(minibatch.plan.together))
    )


def _derivative_without_temperature(original: Any, self: Any, *args: Any) -> Any:
    return original(self, *args) * self.temperature


def _present_reference(run: Any) -> None:
    if run.policy.reference is not None:
        run.policy.take_reference(reset_optimizer=False)


def _backwards(original: Any, cls: Any, *args: Any) -> Any:
    step = original(cls, *args)
    for found in step.logprobs:
        for by_row in found.values():
            by_row.update({row: values[::-1].copy() for row, values in by_row.items()})
    return step


def _lost_counts(original: Any, cls: Any, *args: Any) -> Any:
    step = original(cls, *args)
    step.sums.sums = {name: replace(item, count=1.0) for name, item in step.sums.sums.items()}
    return step


def _other_config(original: Any, source: Path, target: Path, **options: Any) -> None:
    original(source, target, **options)
    file = target / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"rms_norm_eps": 10 * content["rms_norm_eps"]}))


FOURTH: dict[str, Planted] = {
    "the sampler's experts are one token late": Planted(
        target="pacs_megatron.contracts.step_data.TokenBuffers.routes_of",
        change=_one_token_late,
        changes=ROUTED,
        family="qwen3_moe",
    ),
    "each sample has the experts of the next one": Planted(
        target="pacs_megatron.training.step.with_logprobs",
        change=_of_neighbour,
        changes=ROUTED,
        family="qwen3_moe",
    ),
    "the sampler's experts are not replayed": Planted(
        target=f"{POLICY}.routing.Routing.__init__",
        change=lambda original, self, spec, models, given: original(self, spec, models, None),
        changes=ROUTED,
        family="qwen3_moe",
    ),
    "the KL has no gradient": Planted(
        target=f"{OBJECTIVES}.shared.policy_gradient.PolicyGradient._kl",
        change=_without_kl_gradient,
        changes=GRPO,
    ),
    "the entropy has no gradient": Planted(
        target=f"{POLICY}.microbatch.build_record",
        change=_without_entropy_gradient,
        changes=ENTROPY,
    ),
    "the ratio to the sampler divides by one token less": Planted(
        target=f"{POLICY}.microbatch.MicroBatch.means",
        change=_short_means,
        changes={"objective": {"name": "pacs", "importance_cap": 2.0}},
    ),
    "responses of one token are left out": Planted(
        target=f"{BATCHING}.split.plan_microbatches", change=_without_single_tokens
    ),
    "divided groups count as whole": Planted(
        target=f"{POLICY}.engine._with_coupled_rows",
        change=_all_together,
        changes={"batch": {"updates_per_step": 3, "tokens_per_microbatch": 160, "groups": "apart"}},
    ),
    "the derivative of the logits lacks the temperature": Planted(
        target=f"{POLICY}.head._Head.gradient_of_logits",
        change=_derivative_without_temperature,
        changes=TEMPERATURE,
    ),
    "gradients are clipped to 1 % more than the limit": Planted(
        target=f"{POLICY}.optimizer.Optimizer._scale_gradients",
        change=lambda original, self, factor: original(self, 1.01 * factor),
        changes=CLIPPED,
    ),
    "beta 2 of Adam is torch's": Planted(
        target=f"{POLICY}.optimizer.OptimizerConfig",
        change=lambda original, **options: original(**options | {"adam_beta2": 0.999}),
    ),
    "the reference is the present policy after a resume": Planted(
        target="pacs_megatron.training.saving.resume",
        change=_after_resume(_present_reference),
        changes={"objective": {"name": "pacs", "reference": "frozen"}},
    ),
    "log-probs of an open step are restored backwards": Planted(
        target="pacs_megatron.training.progress.OpenStep.from_record", change=_backwards
    ),
    "counts of an open step's metrics are lost": Planted(
        target="pacs_megatron.training.progress.OpenStep.from_record",
        change=_lost_counts,
    ),
    "the converted config.json has another epsilon": Planted(
        target="pacs_megatron.checkpoint.hf_folder.copy_hf_metadata", change=_other_config
    ),
}
