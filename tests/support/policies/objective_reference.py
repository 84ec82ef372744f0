"""Random mini-batches, an objective's gradient as an engine computes it, and the reference's loss.

The reference is `certify`'s (pacs_megatron/workbench/certify/formulas), which shares no arithmetic
with the product. This file converts a mini-batch to its arguments, and has the defaults of the
papers, so that a changed default of the product shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.workbench.certify import formulas
from pacs_megatron.workbench.certify.formulas import Metrics, PerSample
from pacs_megatron.workbench.certify.formulas.policy_gradient import sample_advantages

Tensors = Sequence[torch.Tensor]
"""Per sample, [response], float32 or float64; log-probs and entropies in nats"""


# --------------------------------------------------------------------------------------------------
# Mini-batches


@dataclass(kw_only=True)
class Batch:
    """A mini-batch with its tokens: facts [n], flat token tensors [t], float64."""

    facts: SampleFacts
    logprobs: torch.Tensor
    reference: torch.Tensor
    mask: torch.Tensor
    sample_of_token: torch.Tensor
    sampler: torch.Tensor | None = None
    """log-probs of the sampler"""
    step_start: torch.Tensor | None = None
    """None: `reference`"""
    entropy: torch.Tensor | None = None

    @property
    def start(self) -> torch.Tensor:
        """Log-probs at the start of the step."""
        return self.reference if self.step_start is None else self.step_start

    def record(
        self, tokens: torch.Tensor | None = None, logprobs: torch.Tensor | None = None
    ) -> TokenRecord:
        """A micro-batch.

        Args:
            tokens: of the micro-batch; None: all.
            logprobs: [t] of the whole batch, instead of the stored ones.
        """
        rows = torch.arange(len(self.mask)) if tokens is None else tokens
        source = self.logprobs if logprobs is None else logprobs
        return TokenRecord(
            logprobs=source[rows],
            mask=self.mask[rows],
            sample_of_token=self.sample_of_token[rows],
            response_lens=torch.from_numpy(self.facts.response_lens),
            step_start_logprobs=self.start[rows],
            reference_logprobs=self.reference[rows],
            sampler_logprobs=None if self.sampler is None else self.sampler[rows],
            entropy=None if self.entropy is None else self.entropy[rows].to(source.dtype),
            estimates=self._estimates(rows, source.dtype),
        )

    def _estimates(self, rows: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """As if from a critic: any numbers that differ from token to token."""
        factors = {"value": 3.0, "advantage": 5.0, "return": 7.0, "logit": 11.0, "certainty": 13.0}
        return {
            name: (self.reference * factor).sin()[rows].to(dtype)
            for name, factor in factors.items()
        }

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """[n], masked sums by sample."""
        total = torch.zeros(self.facts.num_samples, dtype=values.dtype)
        return total.index_add(0, self.sample_of_token, values * self.mask)

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The trained tokens of each sample, [response] each, of `values` [t]."""
        parts = []
        for row in range(self.facts.num_samples):
            parts.append(values[(self.sample_of_token == row) & (self.mask == 1)])
        return parts


def make_facts(
    groups: Sequence[int],
    labels: Sequence[float],
    *,
    lens: Sequence[int] | None = None,
    truncated: Sequence[bool] | None = None,
    rewards: Sequence[float] | None = None,
    log_ratio_to_sampler: Sequence[float] | None = None,
) -> SampleFacts:
    """Facts of samples in `groups`, with ids in the order of the rows.

    Args:
        lens: response lengths; None: 1 token each.
        truncated: None: none.
        rewards: None: the labels.
        log_ratio_to_sampler: None: not known.
    """
    n = len(groups)
    ratios = None
    if log_ratio_to_sampler is not None:
        ratios = np.asarray(log_ratio_to_sampler, np.float64)
    return SampleFacts(
        ids=tuple(f"0:data/{group}#{row}" for row, group in enumerate(groups)),
        groups=np.asarray(groups, dtype=np.int64),
        labels=np.asarray(labels, dtype=np.float64),
        rewards=np.asarray(labels if rewards is None else rewards, dtype=np.float64),
        prompt_lens=np.full(n, 5, dtype=np.int64),
        response_lens=np.asarray(lens if lens is not None else [1] * n, dtype=np.int64),
        environment_lens=np.zeros(n, dtype=np.int64),
        truncated=np.asarray(truncated if truncated is not None else [False] * n, dtype=np.bool_),
        log_ratio_to_sampler=ratios,
    )


def make_record(logprobs: torch.Tensor, lens: Sequence[int], **fields: Any) -> TokenRecord:
    """All tokens of all responses, none masked; `fields` are further fields of the record."""
    return TokenRecord(
        logprobs=logprobs,
        mask=torch.ones_like(logprobs),
        sample_of_token=torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)),
        response_lens=torch.tensor(lens),
        **fields,
    )


def random_batch(
    seed: int, sizes: Sequence[int] = (2, 3, 4, 5, 6, 7, 8, 4, 3), spread: float = 0.5
) -> Batch:
    """Groups of `sizes` at random positions in the batch; mixed and one-class groups; some tokens
    masked out.

    Args:
        spread: standard deviation of the reference's log-probs from the policy's.
    """
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    labels = rng.integers(0, 2, len(groups)).astype(float)
    labels[groups == len(sizes) - 1] = 1.0
    labels[groups == len(sizes) - 2] = 0.0

    raw_lens = rng.integers(2, 9, len(groups))
    sample_of_token = np.repeat(np.arange(len(groups)), raw_lens)
    mask = (rng.random(len(sample_of_token)) < 0.8).astype(float)
    mask[np.cumsum(raw_lens) - 1] = 1.0
    logprobs = -rng.exponential(1.0, len(mask))
    facts = make_facts(
        groups.tolist(),
        labels.tolist(),
        lens=np.bincount(sample_of_token, weights=mask).astype(int).tolist(),
        truncated=(rng.random(len(groups)) < 0.2).tolist(),
        # Not negative: an objective may divide by their mean.
        rewards=np.abs(labels + rng.normal(0, 0.1, len(groups))).tolist(),
    )
    batch = Batch(
        facts=replace(facts, advantage_abs=rng.exponential(1.0, len(groups))),
        logprobs=torch.from_numpy(logprobs),
        reference=torch.from_numpy(logprobs + rng.normal(0, spread, len(mask))),
        mask=torch.from_numpy(mask),
        sample_of_token=torch.from_numpy(sample_of_token),
        entropy=torch.from_numpy(rng.exponential(1.0, len(mask))),
    )
    estimates = batch.record().estimates
    logits = batch.split(estimates["logit"])
    batch.facts = replace(
        batch.facts,
        certainty=batch.sums(estimates["certainty"]).numpy(),
        logit_min=np.array([float(values.min()) for values in logits]),
        logit_max=np.array([float(values.max()) for values in logits]),
    )
    return batch


# --------------------------------------------------------------------------------------------------
# The product


def objective_gradient(
    objective: Objective, batch: Batch, prepared: Prepared, cuts: int = 1, seed: int = 0
) -> tuple[torch.Tensor, float]:
    """d(sum of token_loss)/d logprobs [t], and the sum, as an engine computes it: micro-batches,
    masked sums, no division.

    Whole samples are assigned to `cuts` micro-batches in a random order, so siblings are separated.
    """
    logprobs = batch.logprobs.clone().requires_grad_(True)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(batch.facts.num_samples))
    total = 0.0
    for rows in torch.tensor_split(order, cuts):
        tokens = torch.nonzero(torch.isin(batch.sample_of_token, rows))[:, 0]
        record = batch.record(tokens, logprobs)
        loss = (objective.token_loss(record, prepared) * record.mask).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    assert logprobs.grad is not None
    return logprobs.grad, total


def objective_scores(objective: Objective, batch: Batch) -> torch.Tensor:
    """r [n] as an engine computes it."""
    with torch.no_grad():
        values = objective.token_scores(batch.record())
        if objective.score_is_maximum:
            return torch.stack([of_sample.max() for of_sample in batch.split(values)])
        return batch.sums(values)


def token_metric_sums(objective: Objective, batch: Batch, prepared: Prepared) -> dict[str, float]:
    """`token_metrics` as an engine computes them: masked sums."""
    with torch.no_grad():
        metrics = objective.token_metrics(batch.record(), prepared)
    return {name: float((values * batch.mask).sum()) for name, values in metrics.items()}


# --------------------------------------------------------------------------------------------------
# The reference

_POLICY_GRADIENT: dict[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl_coef": 0.0,
    "kl_in": None,
    "entropy_coef": 0.0,
    "importance": "none",
    "importance_level": None,
    "loss_mean": "token",
}
_OF_OBJECTIVE: dict[str, dict[str, Any]] = {
    "pacs": {
        "beta": 1.0,
        "reward_proxy": "sum_log_ratio",
        "score": "rloo",
        "score_std_floor": None,
        "weighting": "question",
        "reference": "step_start",
        "actor_term": 0.0,
        "actor_scope": "group",
        "importance_cap": None,
    },
    "grpo": _POLICY_GRADIENT,
    "dapo": _POLICY_GRADIENT | {"clip_high": 0.28, "overlong_penalty": 0.5},
    "dr_grpo": _POLICY_GRADIENT,
    "gspo": _POLICY_GRADIENT | {"clip_low": 3e-4, "clip_high": 4e-4},
    "luspo": _POLICY_GRADIENT | {"clip_low": 2e-3, "clip_high": 2.5e-3},
    "cispo": _POLICY_GRADIENT | {"clip_high": 4.0},
    "rloo": _POLICY_GRADIENT,
    "reinforce_pp": _POLICY_GRADIENT | {"baseline": "none"},
    "w_reinforce": _POLICY_GRADIENT | {"classes": "both", "positive_weight": 0.1},
    "maxrl": _POLICY_GRADIENT,
    "dgpo": _POLICY_GRADIENT | {"difficulty_temperature": 2.0},
    "steer": _POLICY_GRADIENT | {"clip_high": 0.28, "weight_min": 0.8, "ratio_max": 10.0},
    "ucas": _POLICY_GRADIENT | {"correct_coef": 0.25, "wrong_coef": 0.35, "logit_coef": 0.05},
    "vimpo": _POLICY_GRADIENT
    | {
        "clip_high": 0.28,
        "ratio_max": 10.0,
        "beta": 5e-4,
        "actor_coef": 5e-3,
        "lam": 1.0,
        "value_kl": "k3",
    },
    "distill": _POLICY_GRADIENT | {"label_coef": 0.0},
    "ppo": _POLICY_GRADIENT | {"gamma": 1.0, "lam": 1.0, "value_clip": 0.5, "value_coef": 0.5},
    "real": {"tau": 0.5},
    "real_bce": {"tau": 0.5},
    "sft": {"loss_mean": "token"},
}
"""Defaults of docs/objective.md, written again: the reference reads none of the product's."""


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of an objective that the formulas read."""
    defaults = dict(_OF_OBJECTIVE[options["name"]])
    if options.get("kl_coef", 0.0) > 0:
        defaults |= {"kl_in": "loss", "kl_estimator": "k3"}
    if options.get("importance", "none") != "none":
        defaults |= {"importance_level": "token", "importance_cap": 2.0, "importance_floor": None}
    if options.get("importance") == "mask":
        defaults["importance_floor"] = 0.5
    return defaults | dict(options)


def formula_batch(
    options: Mapping[str, Any],
    facts: SampleFacts,
    logprobs: Tensors,
    *,
    starts: Tensors | None = None,
    references: Tensors | None = None,
    samplers: Tensors | None = None,
    entropies: Tensors | None = None,
    certainties: Tensors | None = None,
    logits: Tensors | None = None,
) -> formulas.Batch:
    """A mini-batch, which is a whole rollout batch too, for the formulas.

    Args:
        options: of the objective, without defaults.
        logprobs: of the policy, with graph.
        starts: at the start of the step; None: those of the policy.
        references: of the frozen reference; None: those of the start.
        samplers: of the rollout engine; None: not used.
        entropies: of the policy, with graph; None: not used.
        certainties: of the start; None: not used.
        logits: of the tokens at the start; None: not used.
    """
    own = [logprob.double() for logprob in logprobs]
    start = _without_graph(own if starts is None else starts)
    groups = [np.flatnonzero(facts.groups == g).tolist() for g in range(facts.num_groups)]
    return formulas.Batch(
        options=with_defaults(options),
        groups=groups,
        labels=torch.from_numpy(facts.labels),
        rewards=torch.from_numpy(facts.rewards),
        logprobs=own,
        start_logprobs=start,
        frozen_logprobs=start if references is None else _without_graph(references),
        sampler_logprobs=[] if samplers is None else _without_graph(samplers),
        entropies=[] if entropies is None else [entropy.double() for entropy in entropies],
        rows=list(range(facts.num_samples)),
        certainties=None if certainties is None else _without_graph(certainties),
        logits=None if logits is None else _without_graph(logits),
    )


def _without_graph(values: Tensors) -> PerSample:
    return [value.detach().double() for value in values]


def reference_loss(
    options: Mapping[str, Any], facts: SampleFacts, logprobs: Tensors, **others: Any
) -> tuple[torch.Tensor, Metrics]:
    """The reference's loss of a mini-batch, with graph, and its metrics.

    Args:
        others: further log-probs and entropies; see `formula_batch`.
    """
    batch = formula_batch(options, facts, logprobs, **others)
    return formulas.OBJECTIVES[options["name"]](batch)


def flat_reference_loss(
    options: Mapping[str, Any],
    batch: Batch,
    logprobs: torch.Tensor,
    entropies: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """`reference_loss` of flat `logprobs` [t] with graph; masked tokens are left out."""
    return reference_loss(
        options,
        batch.facts,
        batch.split(logprobs),
        starts=batch.split(batch.start),
        references=batch.split(batch.reference),
        samplers=None if batch.sampler is None else batch.split(batch.sampler),
        entropies=None if entropies is None else batch.split(entropies),
        certainties=batch.split(batch.record().estimates["certainty"]),
        logits=batch.split(batch.record().estimates["logit"]),
    )


def reference_loss_of_proxies(
    proxies: torch.Tensor, facts: SampleFacts, **options: Any
) -> torch.Tensor:
    """The reference's loss of PACS (8) from reward proxies r [n], with graph."""
    batch = formula_batch({"name": "pacs"} | options, facts, [])
    _, losses = formulas.weighted_losses(proxies, batch.labels, batch.groups, batch.options)
    return losses.mean()


def reference_advantages(options: Mapping[str, Any], facts: SampleFacts) -> np.ndarray:
    """The reference's advantages of a rollout batch, float64 [n]."""
    logprobs = [torch.zeros(int(length)) for length in facts.response_lens]
    return sample_advantages(formula_batch(options, facts, logprobs)).numpy()


def assert_metrics_equal(found: Mapping[str, float], reference: Metrics) -> None:
    """Compares the metrics that the reference has; a mean over nothing is missing."""
    for name, (value, count) in reference.items():
        if count > 0:
            np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
