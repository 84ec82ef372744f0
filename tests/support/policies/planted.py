"""Errors planted into the product, for tests of `certify`.

Its processes fork, so a patch reaches the ranks.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.observability.metrics import MetricSums

OBJECTIVES = "pacs_megatron.objectives"
BATCHING = "pacs_megatron.batching"
POLICY = "pacs_megatron.policy"
FINALIZE = "megatron.core.distributed.finalize_model_grads"
FROZEN = {"objective": {"name": "pacs", "reference": "frozen", "reset_every": 2}}
GRPO = {
    "objective": {"name": "grpo", "kl_coef": 0.1, "importance": "truncate", "loss_mean": "sequence"}
}
DECAY = {
    "optimizer": {"weight_decay": 0.1, "schedule": "linear", "min_lr": 1e-7, "warmup_updates": 2}
}
CLIPPED = {"objective": {"name": "pacs", "clip_grad": 1.0}}
PIPELINE = {"parallel": {"tp": 1, "pp": 2}}
SEQUENCE_PARALLEL = {"parallel": {"tp": 2, "sequence_parallel": True}}
CONTEXT = {"parallel": {"tp": 1, "cp": 2}}
TEMPERATURE = {
    "rollout": {"engine": "embedded", "sampling": {"max_response_tokens": 100, "temperature": 0.7}}
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """`target` (module.attribute) is replaced by `change(original, *arguments)`."""

    target: str
    change: Callable[..., Any]
    changes: dict[str, Any] = field(default_factory=dict)
    """of the configuration, so that it uses the code"""
    family: str = "qwen3"

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        owner, name = _owner(self.target)
        raw = owner.__dict__[name]
        is_wrapped = isinstance(raw, classmethod | staticmethod | property)
        original = raw.fget if isinstance(raw, property) else raw.__func__ if is_wrapped else raw

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return self.change(original, *args, **kwargs)

        patch.setattr(owner, name, type(raw)(replaced) if is_wrapped else replaced)


def _owner(target: str) -> tuple[Any, str]:
    """The module or class of an attribute, and its name."""
    parts = target.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:-1]:
            found = getattr(found, part)
        return found, parts[-1]
    raise AssertionError(target)


def _wrong_slope(original: Any, psi: Any, labels: Any) -> Any:
    loss, slope = original(psi, labels)
    return loss, torch.where(labels == 0.0, 0.98 * slope, slope)


def _without_last_sample(original: Any, *args: Any) -> Any:
    rows = original(*args)
    return [*rows[:-1], rows[-1][:-1]]


def _twice(original: Any, *args: Any, **kwargs: Any) -> Any:
    plan = original(*args, **kwargs)
    first, *others = plan.by_dp_rank
    return replace(plan, by_dp_rank=((*first, first[0]), *others))


def _late_labels(original: Any, *args: Any, **kwargs: Any) -> Any:
    batch = original(*args, **kwargs)
    return replace(batch, labels=torch.roll(batch.labels, 1, -1))


def _one_sequence(original: Any, *args: Any, **kwargs: Any) -> Any:
    batch = original(*args, **kwargs)
    bounds = batch.packed.cu_seqlens_q[[0, -1]]
    batch.packed.cu_seqlens_q = batch.packed.cu_seqlens_kv = bounds
    batch.packed.max_seqlen_q = batch.packed.max_seqlen_kv = int(bounds[-1])
    return batch


def _steep(original: Any, *args: Any, **kwargs: Any) -> Any:
    logprobs, entropy = original(*args, **kwargs)
    return 1.001 * logprobs - (0.001 * logprobs).detach(), entropy


def _in_bits(original: Any, *args: Any, **kwargs: Any) -> Any:
    logprobs, entropy = original(*args, **kwargs)
    return logprobs, entropy / math.log(2)


def _off_by_a_thousandth(original: Any, minibatch: Any, found: Any) -> Any:
    return original(
        minibatch,
        {name: {r: v + np.float32(1e-3) for r, v in rows.items()} for name, rows in found.items()},
    )


def _reversed_coefficients(original: Any, *args: Any) -> Any:
    prepared = original(*args)
    return replace(
        prepared, per_sample={name: values.flip(0) for name, values in prepared.per_sample.items()}
    )


def _decay_everything(original: Any, *args: Any, **kwargs: Any) -> Any:
    optimizer = original(*args, **kwargs)
    for group in optimizer.param_groups:
        group["wd_mult"] = 1.0
    return optimizer


def _half_gradients(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.main_grad.mul_(0.999)


def _one_rank_drifts(original: Any, self: Any) -> Any:
    result = original(self)
    if torch.distributed.get_rank() == 1:
        next(iter(self.optimizers())).get_parameters()[0].data.mul_(1.0001)
    return result


def _after_resume(action: Callable[[Any], None]) -> Callable[..., Any]:
    def change(original: Any, run: Any) -> Any:
        progress = original(run)
        if progress is not None:
            action(run)
        return progress

    return change


def _without_metrics(original: Any, cls: Any, *args: Any) -> Any:
    step = original(cls, *args)
    step.sums = MetricSums()
    return step


def _without_logprobs(original: Any, cls: Any, *args: Any) -> Any:
    step = original(cls, *args)
    step.logprobs = None
    return step


def _round_weights(run: Any) -> None:
    for chunk in run.policy.chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.data.bfloat16())


def _forget_schedule(run: Any) -> None:
    run.policy.optimizer.schedule.num_steps = 0


def _low_scores(original: Any, self: Any, *args: Any) -> Any:
    """Only the scores have the wrong scale; the derivative keeps its beta."""
    return 0.99 * original(self, *args)


def _masked(batch: Any, record: Any) -> Any:
    mask = record.mask.clone()
    if batch.local is None and len(mask) == int(batch.response_lens.sum()):
        mask[np.cumsum(batch.response_lens) - 1] = 0.0
    return replace(record, mask=mask)


def _with(**options: Any) -> Callable[..., Any]:
    def planted(original: Any, *args: Any) -> Any:
        config = original(*args)
        for name, value in options.items():
            assert getattr(config, name) != value
            setattr(config, name, value)
        return config

    return planted


def _own_part(original: Any, self: Any, values: Any) -> Any:
    if self.local is None:
        return values
    full = torch.zeros(len(self.sample_of_token), dtype=values.dtype)
    full[self.local] = values
    return full


def _wrong_denominator(original: Any, *args: Any) -> Any:
    metrics, denominators = original(*args)
    return metrics, denominators | {"policy/entropy": denominators["policy/entropy"] + 1.0}


def _without_last_microbatch(original: Any, *args: Any, **kwargs: Any) -> Any:
    plan = original(*args, **kwargs)
    return replace(plan, by_dp_rank=tuple((*rank[:-1], ()) for rank in plan.by_dp_rank))


def _rounded_logits(original: Any, self: Any, hidden: Any) -> Any:
    return original(self, hidden).bfloat16().float()


def _option(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def planted(original: Any, **options: Any) -> Any:
        return original(**options | {name: change(options[name])})

    return planted


def _forget(name: str) -> Callable[[Any], None]:
    def action(run: Any) -> None:
        for part in run.policy.optimizer.optimizers():
            for state in part.optimizer.state.values():
                state[name].zero_()

    return action


PLANTED: dict[str, Planted] = {
    # ----------------------------------------------------------------------------------------------------
    # objective
    "score without G/(G-1)": Planted(
        target=f"{OBJECTIVES}.shared.scores._leave_one_out",
        change=lambda original, groups: torch.ones_like(original(groups)),
    ),
    "class weights squared": Planted(
        target=f"{OBJECTIVES}.pacs.class_weights",
        change=lambda original, *args: original(*args) ** 2,
    ),
    "slope of wrong responses 2 % low": Planted(
        target=f"{OBJECTIVES}.pacs.sample_loss", change=_wrong_slope
    ),
    "biased standard deviation": Planted(
        target="pacs_megatron.objectives.shared.sample_table.SampleTable.std",
        change=lambda original, self, values: torch.sqrt(self.total(values * values) / self.sizes),
        changes=GRPO,
    ),
    "sequence mean without lengths": Planted(
        target=f"{OBJECTIVES}.shared.policy_gradient.mean_weights",
        change=lambda original, lens, *args: np.full(len(lens), 1.0 / (len(lens) * 7)),
        changes=GRPO,
    ),
    "KL of the other direction": Planted(
        target=f"{OBJECTIVES}.shared.policy_gradient.PolicyGradient._estimate_kl",
        change=lambda original, self, log_ratio: original(self, -log_ratio),
        changes=GRPO,
    ),
    "importance without its cap": Planted(
        target=f"{OBJECTIVES}.shared.policy_gradient.PolicyGradient._importance",
        change=lambda original, self, tokens, prepared: self._sampler_ratio(tokens, prepared),
        changes=GRPO,
    ),
    "ratio never clipped from below": Planted(
        target=f"{OBJECTIVES}.shared.policy_gradient.PolicyGradient.__init__",
        change=lambda original, self, options: original(
            self, options.model_copy(update={"clip_low": 0.99})
        ),
        changes=GRPO,
    ),
    # ---------------------------------------------------------------------------------------------------
    # batch plan
    "the last sample of a step is lost": Planted(
        target=f"{BATCHING}.split.split_by_group", change=_without_last_sample
    ),
    "mini-batches in the other order": Planted(
        target=f"{BATCHING}.split.split_by_group",
        change=lambda original, *args: original(*args)[::-1],
    ),
    "a micro-batch is trained twice": Planted(
        target=f"{BATCHING}.split.plan_microbatches", change=_twice
    ),
    "labels one token late": Planted(
        target=f"{POLICY}.engine.build_microbatch", change=_late_labels
    ),
    "samples of a pack attend to each other": Planted(
        target=f"{POLICY}.engine.build_microbatch", change=_one_sequence
    ),
    # ---------------------------------------------------------------------------------------------------------
    # head
    "gradient of the head 0.1 % high": Planted(
        target=f"{POLICY}.model.token_logprobs", change=_steep
    ),
    "padding of the vocabulary has probability": Planted(
        target=f"{POLICY}.head._Head.num_valid", change=lambda original, self: self.weight.shape[0]
    ),
    "temperature is missing in the backward pass": Planted(
        target=f"{POLICY}.head._Head.gradient_of_logits",
        change=lambda original, self, *args: original(replace(self, temperature=1.0), *args),
        changes=TEMPERATURE,
    ),
    "entropy in bits": Planted(target=f"{POLICY}.model.token_logprobs", change=_in_bits),
    # -------------------------------------------------------------------------------------------------------
    # passes
    "reference pass with the policy's weights": Planted(
        target=f"{POLICY}.weights.Snapshot._swap",
        change=lambda original, self: None,
        changes=FROZEN,
    ),
    "log-probs of the step's start 0.001 high": Planted(
        target="pacs_megatron.training.step.with_logprobs", change=_off_by_a_thousandth
    ),
    "coefficients of a micro-batch in the other order": Planted(
        target=f"{POLICY}.microbatch.UpdateLoss._coupled", change=_reversed_coefficients
    ),
    # ----------------------------------------------------------------------------------------------------
    # optimizer
    "norms decay": Planted(
        target=f"{POLICY}.optimizer.get_megatron_optimizer", change=_decay_everything, changes=DECAY
    ),
    "clipped to 99 % of the limit": Planted(
        target=f"{POLICY}.optimizer.Optimizer._scale_gradients",
        change=lambda original, self, factor: original(self, 0.99 * factor),
        changes=CLIPPED,
    ),
    "warm-up one update longer": Planted(
        target=f"{POLICY}.optimizer.OptimizerParamScheduler",
        change=lambda original, *args, **options: original(
            *args, **options | {"lr_warmup_steps": options["lr_warmup_steps"] + 1}
        ),
        changes=DECAY,
    ),
    "moments survive a reset of the reference": Planted(
        target=f"{POLICY}.optimizer.Optimizer.reset_moments",
        change=lambda original, self: None,
        changes=FROZEN,
    ),
    "second moment decays as the first": Planted(
        target=f"{POLICY}.optimizer.OptimizerConfig",
        change=lambda original, **options: original(
            **options | {"adam_beta2": options["adam_beta1"]}
        ),
    ),
    "gradients 0.1 % low": Planted(
        target=f"{POLICY}.engine.finalize_model_grads", change=_half_gradients
    ),
    "one data-parallel rank drifts": Planted(
        target=f"{POLICY}.optimizer.Optimizer.step", change=_one_rank_drifts
    ),
    # -------------------------------------------------------------------------------------------------------
    # resume
    "moments are not restored": Planted(
        target="pacs_megatron.training.saving.resume",
        change=_after_resume(lambda run: run.policy.optimizer.reset_moments()),
    ),
    "the schedule starts again": Planted(
        target="pacs_megatron.training.saving.resume",
        change=_after_resume(_forget_schedule),
        changes=DECAY,
    ),
    "the reference is not restored": Planted(
        target="pacs_megatron.training.saving.resume",
        change=_after_resume(lambda run: run.policy.take_reference(reset_optimizer=False)),
        changes=FROZEN,
    ),
    "metrics of an interrupted step are lost": Planted(
        target="pacs_megatron.training.progress.OpenStep.from_record", change=_without_metrics
    ),
    "log-probs of an interrupted step are computed again": Planted(
        target="pacs_megatron.training.progress.OpenStep.from_record", change=_without_logprobs
    ),
    "resumed weights are rounded": Planted(
        target="pacs_megatron.training.saving.resume", change=_after_resume(_round_weights)
    ),
    # ---------------------------------------------------------------------------------------------------
    # conversion
    "gate and up are swapped": Planted(
        target="pacs_megatron.models.table.Concat.to_hf",
        change=lambda original, *args: original(*args)[::-1],
    ),
    "key and value are swapped": Planted(
        target="pacs_megatron.models.table.Qkv.to_megatron",
        change=lambda original, self, tensors, dims: original(
            self, [tensors[0], tensors[2], tensors[1]], dims
        ),
    ),
    "the export rounds": Planted(
        target="pacs_megatron.checkpoint.hf_folder.HfFolderWriter.put",
        change=lambda original, self, name, tensor, *args: original(
            self, name, tensor.bfloat16().to(tensor.dtype), *args
        ),
    ),
    "experts in the other order": Planted(
        target="pacs_megatron.convert.convert.Entry.to_hf",
        change=lambda original, self, tensor: tuple(
            part.flip(0) for part in original(self, tensor)
        ),
        family="qwen3_moe",
    ),
    # -------------------------------------------------------------------------------------------------
    # second round
    "beta of the scores 1 % low": Planted(
        target=f"{OBJECTIVES}.pacs.Pacs.token_scores", change=_low_scores
    ),
    "the last token of a response has no loss": Planted(
        target=f"{POLICY}.microbatch.build_record",
        change=lambda original, batch, *args, **kwargs: _masked(
            batch, original(batch, *args, **kwargs)
        ),
    ),
    "the reference is never reset": Planted(
        target=f"{POLICY}.engine.MegatronPolicy.take_reference",
        change=lambda original, self, **kw: (
            self.optimizer.reset_moments() if self.reference else original(self, **kw)
        ),
        changes=FROZEN,
    ),
    "group size of the configuration in the leave-one-out score": Planted(
        target=f"{OBJECTIVES}.shared.scores._leave_one_out",
        change=lambda original, groups: torch.full_like(original(groups), 4 / 3),
    ),
    "bf16 logits": Planted(target=f"{POLICY}.head._Head.logits", change=_rounded_logits),
    "query heads of the conversion in the other order": Planted(
        target="pacs_megatron.models.table.Qkv.to_hf",
        change=lambda original, self, *args: (lambda q, *others: (q.flip(0), *others))(
            *original(self, *args)
        ),
    ),
    "the last micro-batch of a rank is lost": Planted(
        target=f"{BATCHING}.split.plan_microbatches", change=_without_last_microbatch
    ),
    "N of one data-parallel rank": Planted(
        target=f"{POLICY}.microbatch.UpdateLoss._coupled",
        change=lambda original, *args: (
            lambda prepared: replace(
                prepared, per_sample={k: 2 * v for k, v in prepared.per_sample.items()}
            )
        )(original(*args)),
    ),
    "epsilon of Adam ten times as large": Planted(
        target=f"{POLICY}.optimizer.OptimizerConfig",
        change=_option("adam_eps", lambda value: 10 * value),
    ),
    "weight decay 10 % low": Planted(
        # It sets the rate and the decay of each update.
        target=f"{POLICY}.optimizer.OptimizerParamScheduler",
        change=lambda original, *args, **options: original(
            *args, **options | {name: 0.9 * options[name] for name in ("start_wd", "end_wd")}
        ),
        changes=DECAY,
    ),
    "gradients of tied embeddings are not summed over the stages": Planted(
        target=f"{FINALIZE}._allreduce_word_embedding_grads",
        change=lambda original, *args, **kwargs: None,
        changes=PIPELINE,
        family="qwen3-tied-mha-odd-vocabulary",
    ),
    "gradients of norms are not summed over sequence-parallel ranks": Planted(
        target=f"{FINALIZE}._allreduce_non_tensor_model_parallel_grads",
        change=lambda original, *args, **kwargs: None,
        changes=SEQUENCE_PARALLEL,
    ),
    "gradients of the last update stay": Planted(
        target=f"{POLICY}.optimizer.Optimizer.zero_grad", change=lambda original, self, chunks: None
    ),
    "base of the rotary positions 1 % high": Planted(
        target=f"{POLICY}.model.rope_frequencies",
        change=lambda original, spec: original(replace(spec, rope_theta=1.01 * spec.rope_theta)),
    ),
    "rotary pairs are interleaved": Planted(
        target=f"{POLICY}.engine.transformer_config", change=_with(rotary_interleaved=True)
    ),
    "epsilon of the norms 1e-5": Planted(
        target=f"{POLICY}.engine.transformer_config", change=_with(layernorm_epsilon=1e-5)
    ),
    "weights of the chosen experts are not normalised": Planted(
        target=f"{POLICY}.engine.transformer_config",
        change=_with(moe_router_pre_softmax=True),
        family="qwen3_moe",
    ),
    "scores of one context-parallel rank": Planted(
        target=f"{POLICY}.microbatch.MicroBatch.gather", change=_own_part, changes=CONTEXT
    ),
    "second moments are not restored": Planted(
        target="pacs_megatron.training.saving.resume", change=_after_resume(_forget("exp_avg_sq"))
    ),
    "the bias correction starts again": Planted(
        target="pacs_megatron.training.saving.resume",
        change=_after_resume(lambda run: run.policy.optimizer.set_adam_step(0)),
    ),
    "ratio against the sampler": Planted(
        target=f"{OBJECTIVES}.shared.policy_gradient.PolicyGradient._step_start",
        change=lambda original, self, tokens: tokens.sampler_logprobs,
        changes=GRPO,
    ),
    "derivative of a bf16 log-prob": Planted(
        target=f"{POLICY}.head._Head.gradient_of_logits",
        change=lambda original, self, *args: original(self, *args).bfloat16().float(),
    ),
    "lambda of GAE is 1": Planted(
        target=f"{OBJECTIVES}.ppo.gae",
        change=lambda original, rewards, values, gamma, lam: original(rewards, values, gamma, 1.0),
        changes={"objective": {"name": "ppo", "lam": 0.9}},
    ),
    "the moments of the critic are not restored": Planted(
        target="pacs_megatron.training.saving.resume",
        change=_after_resume(lambda run: run.critic.optimizer.reset_moments()),
        changes={"objective": {"name": "ppo"}},
    ),
    "one metric divides by the wrong count": Planted(
        target=f"{POLICY}.engine.MegatronPolicy._metrics", change=_wrong_denominator
    ),
    "later updates choose their own experts": Planted(
        target=f"{POLICY}.routing.Routing.__init__",
        change=lambda original, self, spec, models, given: original(self, spec, models, None),
        changes={"batch": {"updates_per_step": 4}},
        family="qwen3_moe",
    ),
}
