"""A third round of planted errors for `certify`, chosen without looking at its comparisons;
`PLANTED` has all rounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.support.policies.planted import (
    BATCHING,
    DECAY,
    GRPO,
    OBJECTIVES,
    POLICY,
    TEMPERATURE,
    Planted,
    _after_resume,
    _option,
)
from tests.support.policies.planted import PLANTED as EARLIER
from tests.support.policies.planted_fourth import FOURTH

CRITIC = {"objective": {"name": "ppo"}}
FOUR = {"batch": {"updates_per_step": 4}}


def _of_the_minibatch(original: Any, labels: Any, groups: Any, weighting: Any) -> Any:
    positives = labels.sum()
    own = torch.where(labels == 1.0, positives, len(labels) - positives)
    return len(labels) / (2.0 * own)


def _half_in_one_class(original: Any, labels: Any, groups: Any, weighting: Any) -> Any:
    weights = original(labels, groups, weighting)
    positives = groups.total(labels)[groups.of_sample]
    return torch.where(
        (positives == 0) | (positives == groups.sizes[groups.of_sample]), 0.5 * weights, weights
    )


def _bounds_one_late(original: Any, *args: Any, **kwargs: Any) -> Any:
    batch = original(*args, **kwargs)
    bounds = batch.packed.cu_seqlens_q.clone()
    bounds[1:-1] += 1
    batch.packed.cu_seqlens_q = batch.packed.cu_seqlens_kv = bounds
    batch.packed.max_seqlen_q = batch.packed.max_seqlen_kv = int(bounds.diff().max())
    return batch


def _frozen_norm(original: Any, chunks: Any, *args: Any) -> Any:
    for chunk in chunks:
        norm = getattr(chunk.decoder, "final_layernorm", None)
        if norm is not None:
            norm.weight.register_hook(torch.zeros_like)
    return original(chunks, *args)


def _present_start(original: Any, run: Any, step: Any, minibatch: Any, inputs: Any) -> Any:
    if minibatch.index and minibatch.step_start_logprobs is not None:
        minibatch = replace(
            minibatch, step_start_logprobs=run.policy.logprobs(minibatch, "step_start")
        )
    return original(run, step, minibatch, inputs)


def _at_temperature_1(original: Any, self: Any, minibatch: Any, source: Any, *args: Any) -> Any:
    before = [model.temperature for model in self.models]
    for model in self.models:
        model.temperature = 1.0 if source == "step_start" else model.temperature
    try:
        return original(self, minibatch, source, *args)
    finally:
        for model, temperature in zip(self.models, before, strict=True):
            model.temperature = temperature


def _embeddings_without_decay(original: Any, *args: Any, **kwargs: Any) -> Any:
    optimizer = original(*args, **kwargs)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        groups = part.optimizer.param_groups
        for group in list(groups):
            embeddings = [p for p in group["params"] if p.ndim == 2 and p.shape[0] >= 100]
            if embeddings and group["wd_mult"]:
                group["params"] = [
                    p for p in group["params"] if all(p is not e for e in embeddings)
                ]
                groups.append({**group, "params": embeddings, "wd_mult": 0.0})
    return optimizer


def _rolled_moments(run: Any) -> None:
    for part in run.policy.optimizer.optimizers():
        for state in part.optimizer.state.values():
            state["exp_avg"].copy_(state["exp_avg"].roll(1, 0))


def _exchanged_norms(original: Any, self: Any, read: Any) -> None:
    """In the import and in the export."""

    def swap(name: str) -> str:
        other = name.replace("q_norm", "\0").replace("k_norm", "q_norm")
        return other.replace("\0", "k_norm")

    export = self.export_weights
    self.export_weights = lambda: ((swap(name), tensor) for name, tensor in export())
    original(self, lambda name: read(swap(name)))


def _untrained_router(original: Any, *args: Any, **kwargs: Any) -> Any:
    probs, chosen = original(*args, **kwargs)
    return probs.detach(), chosen


def _decay_at_the_peak(original: Any, self: Any, increment: int) -> None:
    original(self, increment)
    for group in self.optimizer.param_groups:
        group["weight_decay"] *= self.max_lr / group["lr"] if group["lr"] else 1.0


def _one_decay_update_more(original: Any, *args: Any, **options: Any) -> Any:
    return original(*args, **options | {"lr_decay_steps": options["lr_decay_steps"] + 1})


THIRD: dict[str, Planted] = {
    "class weights of the mini-batch instead of the group": Planted(
        target=f"{OBJECTIVES}.pacs.class_weights", change=_of_the_minibatch
    ),
    "a group of one class has half of its weight": Planted(
        target=f"{OBJECTIVES}.pacs.class_weights",
        change=_half_in_one_class,
        changes={"objective": {"name": "pacs", "reference": "frozen"}},
    ),
    "no upper limit of a ratio with negative advantage": Planted(
        target=f"{OBJECTIVES}.shared.policy_gradient.PolicyGradient.__init__",
        change=lambda original, self, options: original(
            self, options.model_copy(update={"clip_high": 10.0})
        ),
        changes=GRPO,
    ),
    "the first token of a packed sample belongs to the one before": Planted(
        target=f"{POLICY}.engine.build_microbatch", change=_bounds_one_late
    ),
    "samples of the smallest group are left out of N": Planted(
        target=f"{BATCHING}.split.split_by_group",
        change=lambda original, facts, count: [
            rows if len(rows) < 5 else rows[: -1 if len(rows) % 2 else None]
            for rows in original(facts, count)
        ],
    ),
    "the final norm is not trained": Planted(
        target=f"{POLICY}.engine.wrap_for_training", change=_frozen_norm
    ),
    "step-start log-probs of the update's weights": Planted(
        target="pacs_megatron.training.step.update", change=_present_start, changes=GRPO | FOUR
    ),
    "step-start pass at temperature 1": Planted(
        target=f"{POLICY}.engine.MegatronPolicy.logprobs",
        change=_at_temperature_1,
        changes=TEMPERATURE,
    ),
    "scale of the attention 0.1 % low": Planted(
        target=f"{POLICY}.engine.transformer_config",
        change=lambda original, spec, *args: (
            lambda config: (setattr(config, "softmax_scale", 0.999 * spec.head_dim**-0.5), config)[
                1
            ]  # type: ignore[func-returns-value]
        )(original(spec, *args)),
    ),
    "decay at the peak rate": Planted(
        target="megatron.core.optimizer_param_scheduler.OptimizerParamScheduler.step",
        change=_decay_at_the_peak,
        changes=DECAY,
    ),
    "embeddings do not decay": Planted(
        target=f"{POLICY}.optimizer.get_megatron_optimizer",
        change=_embeddings_without_decay,
        changes=DECAY,
    ),
    "first moments are restored one row late": Planted(
        target="pacs_megatron.training.saving.resume", change=_after_resume(_rolled_moments)
    ),
    "norms of query and key are exchanged in the weight table": Planted(
        target=f"{POLICY}.engine.MegatronPolicy.load_weights", change=_exchanged_norms
    ),
    "low frequencies of llama3 are not scaled": Planted(
        target=f"{POLICY}.model.rope_frequencies",
        change=lambda original, spec: original(replace(spec, rope_scaling=None)),
        family="llama",
    ),
    "the router is not trained": Planted(
        target="megatron.core.transformer.moe.router.topk_routing_with_score_function",
        change=_untrained_router,
        family="qwen3_moe",
    ),
    "one update more until the lowest rate": Planted(
        target=f"{POLICY}.optimizer.OptimizerParamScheduler",
        change=_one_decay_update_more,
        changes=DECAY,
    ),
    "planned updates without groups do not move the schedule": Planted(
        target=f"{POLICY}.optimizer.Optimizer.advance_schedule",
        change=lambda original, self, position: None,
        changes=DECAY | FOUR,
    ),
    "values are never clipped": Planted(
        target=f"{OBJECTIVES}.ppo.ValueLoss._clipped",
        change=lambda original, self, tokens: tokens.logprobs,
        changes={"objective": {"name": "ppo", "value_clip": 0.05}},
    ),
    "the critic has the policy's learning rate": Planted(
        target="pacs_megatron.training.context.critic_optimizer",
        change=lambda original, options, lr: options,
        changes=CRITIC,
    ),
    "gamma is 1 in the last step of GAE": Planted(
        target=f"{OBJECTIVES}.ppo.gae",
        change=lambda original, rewards, values, gamma, lam: original(rewards, values, 1.0, lam),
        changes={"objective": {"name": "ppo", "gamma": 0.9}},
    ),
    "epsilon of Adam 5 % high": Planted(
        target=f"{POLICY}.optimizer.OptimizerConfig",
        change=_option("adam_eps", lambda value: 1.05 * value),
    ),
}
PLANTED = EARLIER | THIRD | FOURTH
