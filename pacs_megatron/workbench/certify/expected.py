"""The expected report of an update: forward passes, skipped samples, metrics of tokens.

Written from docs/objective.md and docs/metrics.md. It imports nothing of pacs_megatron but
`formulas/`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pacs_megatron.workbench.certify.formulas import (
    OBJECTIVES,
    Batch,
    Metrics,
    Options,
    PerSample,
    policy_gradient,
    token_advantages,
)


def passes(o: Options, index: int) -> Metrics:
    """The forward-only log-prob passes of update `index` of a step (docs/objective.md)."""
    if o["name"] == "pacs":
        needs_start = o["reference"] == "step_start" or o["importance_cap"] is not None
        needs_frozen = o["reference"] == "frozen"
    else:
        needs_start = o["name"] != "sft"
        needs_frozen = o.get("kl_coef", 0.0) > 0 or o["name"] in ("distill", "vimpo")

    # The first update's own forward gives the log-probs of the step's start, unless its rewards or
    # advantages need them before.
    is_due = index > 0 or o.get("kl_in") == "reward" or o["name"] in ("vimpo", "ucas")
    return {
        "passes/step_start": (float(needs_start and is_due), 1.0),
        "passes/reference": (float(needs_frozen), 1.0),
    }


def skips_zero_gradient(o: Options) -> bool:
    """Whether a step's first update leaves samples out whose gradient is exactly 0
    (docs/metrics.md).
    """
    if o["name"] == "pacs":
        return bool(o["reference"] == "step_start" and o["importance_cap"] is None)
    if (
        o["name"] in ("sft", "distill", "steer", "vimpo", "ucas")
        or o.get("importance_level") == "sequence"
    ):
        return False
    # The KL and the entropy of the loss need every trained sample, also one without advantage. All
    # samples that W-REINFORCE trains have one.
    has_other_terms = o.get("kl_coef", 0) > 0 or o.get("entropy_coef", 0) > 0
    return o["name"] == "w_reinforce" or not has_other_terms


def has_no_gradient(batch: Batch, derivatives: PerSample) -> list[bool]:
    """Whether each sample's gradient is 0 by its group.

    A sample whose tokens are all masked (`importance: mask`) has an advantage, so it counts as one
    with a gradient.

    Args:
        derivatives: of the loss by each log-prob.
    """
    if OBJECTIVES[batch.options["name"]] is policy_gradient:
        return [not bool(advantage.any()) for advantage in token_advantages(batch)]
    sizes = [float(derivative.abs().max()) for derivative in derivatives]
    return [size <= 1e-12 * max(sizes) for size in sizes]


def step_metrics(entropies: Tensor) -> Metrics:
    """The metrics of a step over the tokens of all its samples (docs/metrics.md).

    Args:
        entropies: [t], nats, with the weights at the start of the step.
    """
    return {"policy/entropy_step_start": (float(entropies.mean()), float(len(entropies)))}


def token_metrics(
    logprobs: Tensor, entropies: Tensor, sampler_logprobs: Tensor, case: Mapping[str, Any]
) -> Metrics:
    """policy/* and mismatch/* over the tokens of an update's forward pass (docs/metrics.md).

    Args:
        logprobs: [t], nats.
        entropies: [t], nats.
        sampler_logprobs: [t], nats.
        case: the content of case.json.
    """
    values = {"policy/entropy": entropies.mean(), "policy/logprob_mean": logprobs.mean()}
    if case["is_sampled"]:
        q = logprobs - sampler_logprobs
        values["mismatch/logprob_abs_mean"] = q.abs().mean()
        values["mismatch/logprob_abs_max"] = q.abs().max()
        values["mismatch/ratio"] = q.mean().exp()
        values["mismatch/kl"] = (q.exp() - 1 - q).mean()
        values["mismatch/over_frac"] = (q.abs() > case["mismatch_threshold"]).double().mean()
    num_tokens = float(len(logprobs))
    return {name: (float(value), num_tokens) for name, value in values.items()}
