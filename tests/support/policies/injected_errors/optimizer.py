"""Errors in the optimizer: gradients, clipping, schedule, decay, moments."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.policies.injected_errors.injection import (
    CLIPPED,
    DECAY,
    FOUR_UPDATES,
    FROZEN,
    POLICY,
    PPO,
    TRAINING,
    InjectedError,
    does_nothing,
    with_option,
)

OPTIMIZER = f"{POLICY}.optimizer"
FINALIZE = "megatron.core.distributed.finalize_model_grads"
PIPELINE = {"parallel": {"tp": 1, "pp": 2}}
SEQUENCE_PARALLEL = {"parallel": {"tp": 2, "sequence_parallel": True}}


def _low_gradients(original: Any, model: Any, *args: Any, **options: Any) -> None:
    original(model, *args, **options)
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.main_grad.mul_(0.999)


def _low_limit(original: Any, self: Any, factor: Any) -> Any:
    return original(self, 0.99 * factor)


def _high_limit(original: Any, self: Any, factor: Any) -> Any:
    return original(self, 1.01 * factor)


def _one_rank_drifts(original: Any, self: Any) -> Any:
    result = original(self)
    if torch.distributed.get_rank() == 1:
        next(iter(self.optimizers())).get_parameters()[0].data.mul_(1.0001)
    return result


def _everything_decays(original: Any, *args: Any, **options: Any) -> Any:
    optimizer = original(*args, **options)
    for group in optimizer.param_groups:
        group["wd_mult"] = 1.0
    return optimizer


def _embeddings_without_decay(original: Any, *args: Any, **options: Any) -> Any:
    optimizer = original(*args, **options)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        groups = part.optimizer.param_groups
        for group in list(groups):
            embeddings = [p for p in group["params"] if p.ndim == 2 and p.shape[0] >= 100]
            if embeddings and group["wd_mult"]:
                identities = {id(embedding) for embedding in embeddings}
                group["params"] = [p for p in group["params"] if id(p) not in identities]
                groups.append({**group, "params": embeddings, "wd_mult": 0.0})
    return optimizer


def _low_decay(original: Any, *args: Any, **options: Any) -> Any:
    """The schedule sets the rate and the decay of each update."""
    lower = {name: 0.9 * options[name] for name in ("start_wd", "end_wd")}
    return original(*args, **options | lower)


def _decay_at_the_peak(original: Any, self: Any, increment: int) -> None:
    original(self, increment)
    for group in self.optimizer.param_groups:
        if group["lr"]:
            group["weight_decay"] *= self.max_lr / group["lr"]


def _beta_1_twice(original: Any, **options: Any) -> Any:
    return original(**options | {"adam_beta2": options["adam_beta1"]})


def _options_of_the_policy(_original: Any, options: Any, _lr: Any) -> Any:
    return options


OPTIMIZER_ERRORS: dict[str, InjectedError] = {
    "gradients 0.1 % low": InjectedError(
        target=f"{POLICY}.engine.finalize_model_grads", change=_low_gradients
    ),
    "gradients of the last update stay": InjectedError(
        target=f"{OPTIMIZER}.Optimizer.zero_grad", change=does_nothing
    ),
    "gradients of tied embeddings are not summed over the stages": InjectedError(
        target=f"{FINALIZE}._allreduce_word_embedding_grads",
        change=does_nothing,
        changes=PIPELINE,
        family="qwen3-tied-mha-odd-vocabulary",
    ),
    "gradients of norms are not summed over sequence-parallel ranks": InjectedError(
        target=f"{FINALIZE}._allreduce_non_tensor_model_parallel_grads",
        change=does_nothing,
        changes=SEQUENCE_PARALLEL,
    ),
    "clipped to 99 % of the limit": InjectedError(
        target=f"{OPTIMIZER}.Optimizer._scale_gradients", change=_low_limit, changes=CLIPPED
    ),
    "gradients are clipped to 1 % more than the limit": InjectedError(
        target=f"{OPTIMIZER}.Optimizer._scale_gradients", change=_high_limit, changes=CLIPPED
    ),
    "one data-parallel rank drifts": InjectedError(
        target=f"{OPTIMIZER}.Optimizer.step", change=_one_rank_drifts
    ),
    "norms decay": InjectedError(
        target=f"{OPTIMIZER}.get_megatron_optimizer", change=_everything_decays, changes=DECAY
    ),
    "embeddings do not decay": InjectedError(
        target=f"{OPTIMIZER}.get_megatron_optimizer",
        change=_embeddings_without_decay,
        changes=DECAY,
    ),
    "weight decay 10 % low": InjectedError(
        target=f"{OPTIMIZER}.OptimizerParamScheduler", change=_low_decay, changes=DECAY
    ),
    "decay at the peak rate": InjectedError(
        target="megatron.core.optimizer_param_scheduler.OptimizerParamScheduler.step",
        change=_decay_at_the_peak,
        changes=DECAY,
    ),
    "warm-up one update longer": InjectedError(
        target=f"{OPTIMIZER}.OptimizerParamScheduler",
        change=with_option("lr_warmup_steps", lambda steps: steps + 1),
        changes=DECAY,
    ),
    "one update more until the lowest rate": InjectedError(
        target=f"{OPTIMIZER}.OptimizerParamScheduler",
        change=with_option("lr_decay_steps", lambda steps: steps + 1),
        changes=DECAY,
    ),
    "planned updates without groups do not move the schedule": InjectedError(
        target=f"{OPTIMIZER}.Optimizer.advance_schedule",
        change=does_nothing,
        changes=DECAY | FOUR_UPDATES,
    ),
    "moments survive a reset of the reference": InjectedError(
        target=f"{OPTIMIZER}.Optimizer.reset_moments", change=does_nothing, changes=FROZEN
    ),
    "second moment decays as the first": InjectedError(
        target=f"{OPTIMIZER}.OptimizerConfig", change=_beta_1_twice
    ),
    "beta 2 of Adam is torch's": InjectedError(
        target=f"{OPTIMIZER}.OptimizerConfig", change=with_option("adam_beta2", lambda _beta: 0.999)
    ),
    "epsilon of Adam ten times as large": InjectedError(
        target=f"{OPTIMIZER}.OptimizerConfig", change=with_option("adam_eps", lambda eps: 10 * eps)
    ),
    "epsilon of Adam 5 % high": InjectedError(
        target=f"{OPTIMIZER}.OptimizerConfig",
        change=with_option("adam_eps", lambda eps: 1.05 * eps),
    ),
    "the critic has the policy's learning rate": InjectedError(
        target=f"{TRAINING}.context.critic_optimizer",
        change=_options_of_the_policy,
        changes=PPO,
    ),
}
