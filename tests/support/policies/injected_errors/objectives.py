"""Errors in objectives: scores, weights, losses, advantages, clips, means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.support.policies.injected_errors.injection import (
    DISTILL,
    GRPO,
    OBJECTIVES,
    POLICY,
    STEER,
    TRAINING,
    UCAS,
    VIMPO,
    InjectedError,
)

SCORES = f"{OBJECTIVES}.shared.scores"
GRADIENT = f"{OBJECTIVES}.shared.policy_gradient"


def _one(original: Any, table: Any) -> Any:
    return torch.ones_like(original(table))


def _of_four_samples(original: Any, table: Any) -> Any:
    """G of the configuration instead of the group's."""
    return torch.full_like(original(table), 4 / 3)


def _squared(original: Any, *args: Any) -> Any:
    return original(*args) ** 2


def _of_the_minibatch(_original: Any, labels: Any, _table: Any, _weighting: Any) -> Any:
    positives = labels.sum()
    class_size = torch.where(labels == 1.0, positives, len(labels) - positives)
    return len(labels) / (2.0 * class_size)


def _half_in_one_class(original: Any, labels: Any, table: Any, weighting: Any) -> Any:
    weights = original(labels, table, weighting)
    positives = table.total(labels)[table.group_of_sample]
    sizes = table.sizes[table.group_of_sample]
    is_one_class = (positives == 0) | (positives == sizes)
    return torch.where(is_one_class, 0.5 * weights, weights)


def _low_slope_of_wrong_responses(original: Any, psi: Any, labels: Any) -> Any:
    loss, slope = original(psi, labels)
    return loss, torch.where(labels == 0.0, 0.98 * slope, slope)


def _low_scores(original: Any, self: Any, tokens: Any) -> Any:
    """Only the scores have the wrong scale; the derivative keeps its beta."""
    return 0.99 * original(self, tokens)


def _short_means(original: Any, self: Any, values: Any) -> Any:
    """One token less in the divisor."""
    lens = self.all_response_lens[self.row_index].double()
    return original(self, values) * lens / (lens - 1).clamp(min=1)


def _biased_std(_original: Any, self: Any, centred: Any) -> Any:
    return torch.sqrt(self.total(centred * centred) / self.sizes)


def _without_lengths(_original: Any, lens: Any, *_args: Any) -> Any:
    return np.full(len(lens), 1.0 / (len(lens) * 7))


def _other_direction(original: Any, self: Any, log_ratio: Any) -> Any:
    return original(self, -log_ratio)


def _without_gradient(original: Any, self: Any, tokens: Any) -> Any:
    return original(self, tokens).detach()


def _entropy_without_gradient(
    original: Any, batch: Any, logprobs: Any, entropy: Any, **options: Any
) -> Any:
    return original(batch, logprobs, None if entropy is None else entropy.detach(), **options)


def _without_cap(_original: Any, self: Any, tokens: Any, prepared: Any) -> Any:
    return self._sampler_ratio(tokens, prepared)


def _never_clipped_from_below(original: Any, self: Any, options: Any) -> Any:
    return original(self, options.model_copy(update={"clip_low": 0.99}))


def _never_clipped_from_above(original: Any, self: Any, options: Any) -> Any:
    return original(self, options.model_copy(update={"clip_high": 10.0}))


def _all_samples_have_terms(_original: Any, _self: Any, facts: Any, advantages: Any) -> Any:
    """The KL and the entropy of samples that PSR and NSR do not train, over the trained tokens."""
    num_tokens = int(facts.response_lens[(advantages != 0.0).numpy()].sum())
    return np.full(facts.num_samples, 1.0 / max(num_tokens, 1))


def _cut_ratio_with_gradient(original: Any, self: Any, *args: Any) -> Any:
    per_sample = original(self, *args)
    return per_sample | {"ratio_slope": torch.ones_like(per_sample["ratio"])}


def _cut_log_ratio(original: Any, self: Any, log_ratio: Any) -> Any:
    return original(self, log_ratio.clamp(max=20.0))


def _without_start(_original: Any, self: Any, tokens: Any, prepared: Any) -> Any:
    """The teacher's log-prob alone."""
    labels = prepared.per_sample["advantage"][tokens.sample_of_token]
    return labels + self._teacher(tokens)


def _of_grpo(_original: Any, self: Any, rewards: Any, table: Any) -> Any:
    return super(type(self), self).advantages(rewards, table)


def _of_first_samples(
    original: Any, self: Any, table: Any, scores: Any, ratios: Any, known: Any
) -> Any:
    return original(
        self, table, scores[: len(scores) // 2].max().expand(len(scores)), ratios, known
    )


def _without_entropy(original: Any, self: Any, tokens: Any, prepared: Any) -> Any:
    without = replace(tokens, entropy=torch.zeros_like(tokens.entropy))
    return original(self, without, prepared)


def _mean_certainty(original: Any, *args: Any) -> Any:
    facts = original(*args)
    return replace(facts, certainty=facts.certainty / facts.response_lens)


def _not_shifted(original: Any, self: Any, facts: Any) -> Any:
    inputs = original(self, facts)
    return inputs | {"logit_shift": np.zeros_like(inputs["logit_shift"])}


def _log_ratio_alone(_original: Any, self: Any, log_ratio: Any) -> Any:
    return self.options.beta * log_ratio


def _without_baseline(original: Any, self: Any, facts: Any, step_inputs: Any) -> Any:
    return original(self, facts, step_inputs) | {"target": torch.from_numpy(facts.rewards)}


def _half(original: Any, self: Any, tokens: Any, prepared: Any) -> Any:
    return 0.5 * original(self, tokens, prepared)


def _sampler_for_start(_original: Any, _self: Any, tokens: Any) -> Any:
    return tokens.sampler_logprobs


def _lambda_1(original: Any, rewards: Any, values: Any, gamma: float, _lam: float) -> Any:
    return original(rewards, values, gamma, 1.0)


def _gamma_1(original: Any, rewards: Any, values: Any, _gamma: float, lam: float) -> Any:
    return original(rewards, values, 1.0, lam)


def _not_clipped(_original: Any, _self: Any, tokens: Any) -> Any:
    return tokens.logprobs


def _wrong_denominator(original: Any, *args: Any) -> Any:
    metrics, denominators = original(*args)
    return metrics, denominators | {"policy/entropy": denominators["policy/entropy"] + 1.0}


OBJECTIVE_ERRORS: dict[str, InjectedError] = {
    "score without G/(G-1)": InjectedError(target=f"{SCORES}._leave_one_out", change=_one),
    "group size of the configuration in the leave-one-out score": InjectedError(
        target=f"{SCORES}._leave_one_out", change=_of_four_samples
    ),
    "beta of the scores 1 % low": InjectedError(
        target=f"{OBJECTIVES}.pacs.Pacs.token_scores", change=_low_scores
    ),
    "class weights squared": InjectedError(
        target=f"{OBJECTIVES}.pacs.class_weights", change=_squared
    ),
    "class weights of the mini-batch instead of the group": InjectedError(
        target=f"{OBJECTIVES}.pacs.class_weights", change=_of_the_minibatch
    ),
    "a group of one class has half of its weight": InjectedError(
        target=f"{OBJECTIVES}.pacs.class_weights",
        change=_half_in_one_class,
        changes={"objective": {"name": "pacs", "reference": "frozen"}},
    ),
    "slope of wrong responses 2 % low": InjectedError(
        target=f"{OBJECTIVES}.pacs.sample_loss", change=_low_slope_of_wrong_responses
    ),
    "the ratio to the sampler divides by one token less": InjectedError(
        target=f"{POLICY}.microbatch.MicroBatch.means",
        change=_short_means,
        changes={"objective": {"name": "pacs", "importance_cap": 2.0}},
    ),
    "biased standard deviation": InjectedError(
        target=f"{OBJECTIVES}.shared.sample_table.SampleTable.std",
        change=_biased_std,
        changes=GRPO,
    ),
    "sequence mean without lengths": InjectedError(
        target=f"{GRADIENT}.mean_weights", change=_without_lengths, changes=GRPO
    ),
    "KL of the other direction": InjectedError(
        target=f"{GRADIENT}.PolicyGradient._estimate_kl", change=_other_direction, changes=GRPO
    ),
    "the KL has no gradient": InjectedError(
        target=f"{GRADIENT}.PolicyGradient._kl", change=_without_gradient, changes=GRPO
    ),
    "the entropy has no gradient": InjectedError(
        target=f"{POLICY}.microbatch.build_record",
        change=_entropy_without_gradient,
        changes={"objective": {"name": "grpo", "entropy_coef": 0.01}},
    ),
    "importance without its cap": InjectedError(
        target=f"{GRADIENT}.PolicyGradient._importance", change=_without_cap, changes=GRPO
    ),
    "ratio never clipped from below": InjectedError(
        target=f"{GRADIENT}.PolicyGradient.__init__",
        change=_never_clipped_from_below,
        changes=GRPO,
    ),
    "no upper limit of a ratio with negative advantage": InjectedError(
        target=f"{GRADIENT}.PolicyGradient.__init__",
        change=_never_clipped_from_above,
        changes=GRPO,
    ),
    "ratio against the sampler": InjectedError(
        target=f"{GRADIENT}.PolicyGradient._step_start", change=_sampler_for_start, changes=GRPO
    ),
    "samples that PSR does not train have the KL of the loss": InjectedError(
        target=f"{OBJECTIVES}.w_reinforce.WReinforce.token_weights",
        change=_all_samples_have_terms,
        changes={"objective": {"name": "w_reinforce", "classes": "positive", "kl_coef": 0.1}},
    ),
    "samples that NSR does not train have the entropy bonus": InjectedError(
        target=f"{OBJECTIVES}.w_reinforce.WReinforce.token_weights",
        change=_all_samples_have_terms,
        changes={"objective": {"name": "w_reinforce", "classes": "negative", "entropy_coef": 0.1}},
    ),
    "a response's ratio keeps its gradient above the limit": InjectedError(
        target=f"{GRADIENT}.PolicyGradient.couple",
        change=_cut_ratio_with_gradient,
        changes={"objective": {"name": "rloo"}},
    ),
    "a geometric mean keeps its gradient above the limit": InjectedError(
        target=f"{GRADIENT}.PolicyGradient.couple",
        change=_cut_ratio_with_gradient,
        changes={"objective": {"name": "gspo"}},
    ),
    "k2 has the limit of an exponential": InjectedError(
        target=f"{GRADIENT}.PolicyGradient._estimate_kl",
        change=_cut_log_ratio,
        changes={"objective": {"name": "grpo", "kl_coef": 0.1, "kl_estimator": "k2"}},
    ),
    "the teacher's advantage without the policy's log-prob": InjectedError(
        target=f"{OBJECTIVES}.distill.Distill.token_advantage",
        change=_without_start,
        changes=DISTILL,
    ),
    "label_coef is 1": InjectedError(
        target=f"{OBJECTIVES}.distill.Distill.advantages",
        change=_of_grpo,
        changes=DISTILL,
    ),
    "the largest change of STEER is that of a micro-batch": InjectedError(
        target=f"{OBJECTIVES}.steer.Steer.couple",
        change=_of_first_samples,
        changes=STEER,
    ),
    "STEER's weight ignores the entropy": InjectedError(
        target=f"{OBJECTIVES}.steer.Steer.token_factor",
        change=_without_entropy,
        changes=STEER,
    ),
    "UCAS's certainty is a mean over tokens": InjectedError(
        target=f"{TRAINING}.phases.with_certainty",
        change=_mean_certainty,
        changes=UCAS,
    ),
    "UCAS's logits are not shifted": InjectedError(
        target=f"{OBJECTIVES}.ucas.Ucas.prepare_step",
        change=_not_shifted,
        changes=UCAS,
    ),
    "VIMPO's value without its KL": InjectedError(
        target=f"{OBJECTIVES}.vimpo.Vimpo._value",
        change=_log_ratio_alone,
        changes=VIMPO,
    ),
    "VIMPO's value against the reward of its response alone": InjectedError(
        target=f"{OBJECTIVES}.vimpo.Vimpo.known",
        change=_without_baseline,
        changes=VIMPO,
    ),
    "the critic's loss has half of its factor": InjectedError(
        target=f"{OBJECTIVES}.ppo.ValueLoss.token_loss",
        change=_half,
        changes={"objective": {"name": "ppo", "value_coef": 1.0}},
    ),
    "lambda of GAE is 1": InjectedError(
        target=f"{OBJECTIVES}.ppo.gae",
        change=_lambda_1,
        changes={"objective": {"name": "ppo", "lam": 0.9}},
    ),
    "gamma is 1 in the last step of GAE": InjectedError(
        target=f"{OBJECTIVES}.ppo.gae",
        change=_gamma_1,
        changes={"objective": {"name": "ppo", "gamma": 0.9}},
    ),
    "values are never clipped": InjectedError(
        target=f"{OBJECTIVES}.ppo.ValueLoss._clipped",
        change=_not_clipped,
        changes={"objective": {"name": "ppo", "value_clip": 0.05}},
    ),
    "one metric divides by the wrong count": InjectedError(
        target=f"{POLICY}.engine.MegatronPolicy._metrics", change=_wrong_denominator
    ),
}
