"""The losses of the rivals of PACS as their papers write them: one sample after the other, autograd
through the whole loss.

It uses data classes of the package, but none of its arithmetic. Tensors may be float32 or float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pacs_megatron.contracts import SampleFacts

Logps = Sequence[torch.Tensor]
"""Per sample, [response], nats"""

KIN: dict[str, dict[str, Any]] = {
    "grpo": {
        "name": "grpo",
        "clip_low": 0.02,
        "clip_high": 0.02,
        "loss_mean": "sequence",
        "kl_coef": 0.3,
    },
    "dapo": {
        "name": "dapo",
        "clip_low": 0.02,
        "clip_high": 0.03,
        "overlong_length": 13,
        "overlong_buffer": 6,
    },
    "dr_grpo": {
        "name": "dr_grpo",
        "constant_length": 13,
        "clip_low": 0.02,
        "clip_high": 0.02,
        "kl_coef": 0.1,
        "kl_estimator": "k3",
        "kl_in": "reward",
    },
    "gspo": {"name": "gspo"},
    "gspo-wide": {
        "name": "gspo",
        "clip_low": 0.02,
        "clip_high": 0.03,
        "kl_coef": 0.2,
        "kl_estimator": "k2",
    },
    "luspo": {
        "name": "luspo",
        "clip_low": 0.01,
        "clip_high": 0.01,
        "importance": "truncate",
        "importance_cap": 1.2,
    },
    "cispo": {"name": "cispo", "clip_high": 0.01, "entropy_coef": 0.05},
    "reinforce_pp": {
        "name": "reinforce_pp",
        "kl_coef": 0.1,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    "reinforce_pp-baseline": {
        "name": "reinforce_pp",
        "baseline": "group",
        "kl_coef": 0.1,
        "kl_estimator": "k2",
        "loss_mean": "dr_grpo",
        "constant_length": 13,
    },
    "rloo": {"name": "rloo", "kl_coef": 0.05, "kl_estimator": "k2", "kl_in": "reward"},
    "rloo-mask": {
        "name": "rloo",
        "importance": "mask",
        "importance_level": "sequence",
        "importance_cap": 3.0,
        "importance_floor": 0.3,
    },
    "w_reinforce": {
        "name": "w_reinforce",
        "importance": "truncate",
        "importance_level": "sequence",
    },
    "psr": {"name": "w_reinforce", "classes": "positive", "clip_high": 0.02},
    "nsr": {
        "name": "w_reinforce",
        "classes": "negative",
        "entropy_coef": 0.1,
        "importance": "mask",
        "importance_cap": 1.2,
        "importance_floor": 0.8,
    },
    "real": {"name": "real"},
    "real_bce": {"name": "real_bce", "tau": 0.3},
}
"""Options of the cases; clips so narrow that they bind within three updates."""


def kl_of(estimator: str, logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[response], joschu.net/blog/kl-approx.html."""
    log_r = reference - logp
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": log_r.exp() - 1 - log_r}[estimator]


def kin_advantages(
    options: dict[str, Any], facts: SampleFacts, starts: Logps, references: Logps | None
) -> list[float]:
    """A [n]."""
    name = options["name"]
    size = facts.num_samples
    if name == "w_reinforce":
        correct, wrong = {"positive": (1.0, 0.0), "negative": (0.0, -1.0)}.get(
            options.get("classes", "both"), (options.get("positive_weight", 0.1), -1.0)
        )
        return [correct if label == 1 else wrong for label in facts.labels]
    rewards = [float(reward) for reward in facts.rewards]
    if "overlong_length" in options:
        top = options["overlong_length"]
        cache = options["overlong_buffer"]
        for i, length in enumerate(facts.response_lens):
            punishment = (
                0.0
                if length <= top - cache
                else -1.0
                if length > top
                else (top - cache - length) / cache
            )
            rewards[i] += options.get("overlong_penalty", 0.5) * punishment
    if options.get("kl_in") == "reward":
        assert references is not None
        for i in range(size):
            kl = kl_of(options["kl_estimator"], starts[i].double(), references[i].double())
            rewards[i] -= options["kl_coef"] * float(kl.sum())
    groups = [[j for j in range(size) if facts.groups[j] == facts.groups[i]] for i in range(size)]
    means = [float(np.mean([rewards[j] for j in group])) for group in groups]
    if name == "reinforce_pp":
        if options.get("baseline") == "group":
            rewards = [r - m for r, m in zip(rewards, means, strict=True)]
        every = np.repeat(rewards, facts.response_lens)
        return [float((r - every.mean()) / every.std()) for r in rewards]
    if name == "dr_grpo":
        return [r - m for r, m in zip(rewards, means, strict=True)]
    if name == "rloo":
        siblings = [[rewards[j] for j in group if j != i] for i, group in enumerate(groups)]
        return [r - float(np.mean(others)) for r, others in zip(rewards, siblings, strict=True)]
    return [
        (r - m) / (float(np.std([rewards[j] for j in group], ddof=1)) + 1e-6)
        for r, m, group in zip(rewards, means, groups, strict=True)
    ]


def kin_loss(
    options: dict[str, Any],
    facts: SampleFacts,
    logps: Logps,
    starts: Logps,
    *,
    references: Logps | None = None,
    samplers: Logps | None = None,
    entropies: Logps | None = None,
) -> torch.Tensor:
    """The loss of one mini-batch, with graph through `logps` and `entropies`."""
    if options["name"].startswith("real"):
        return _real(options, facts, logps, starts)
    name = options["name"]
    defaults = {
        "dapo": (0.2, 0.28),
        "gspo": (3e-4, 4e-4),
        "luspo": (2e-3, 2.5e-3),
        "cispo": (1.0, 4.0),
    }.get(name, (0.2, 0.2))
    low = options.get("clip_low", defaults[0])
    high = options.get("clip_high", defaults[1])
    advantages = kin_advantages(options, facts, starts, references)
    num_tokens = sum(
        len(p) for p, a in zip(logps, advantages, strict=True) if name != "w_reinforce" or a != 0
    )
    total = logps[0].new_zeros(())
    for i, logp in enumerate(logps):
        advantage = advantages[i]
        log_ratio = logp - starts[i]
        ratio = {"gspo": log_ratio.mean(), "luspo": log_ratio.mean(), "rloo": log_ratio.sum()}.get(
            name, log_ratio
        ).exp()
        if name == "cispo":
            term = -ratio.clamp(max=1 + high).detach() * advantage * logp
        else:
            term = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        if (
            name in ("gspo", "luspo")
            and options.get("importance_level", "token") == "token"
            and samplers is not None
        ):
            # A ratio per token needs a term per token: the sample's ratio with the gradient by the
            # token's log-prob.
            ratio = ratio.detach() * (1 + logp - logp.detach())
            term = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        if "importance" in options:
            assert samplers is not None
            w = starts[i] - samplers[i]
            w = (w.sum() if options.get("importance_level") == "sequence" else w).exp()
            cap = options.get("importance_cap", 2.0)
            if options["importance"] == "mask":
                w = torch.where(
                    (w > cap) | (w < options.get("importance_floor", 0.5)), torch.zeros_like(w), w
                )
            term = term * w.clamp(max=cap)
        tokens = term * torch.ones_like(logp)
        if options.get("kl_in", "loss") == "loss" and options.get("kl_coef", 0) > 0:
            assert references is not None
            tokens = tokens + options["kl_coef"] * kl_of(
                options.get("kl_estimator", "k3"), logp, references[i]
            )
        if "entropy_coef" in options:
            assert entropies is not None
            tokens = tokens - options["entropy_coef"] * entropies[i]
        mean = options.get("loss_mean", {"dr_grpo": "dr_grpo"}.get(name, "token"))
        if name in ("gspo", "rloo") or mean == "sequence":
            total = total + tokens.mean() / len(logps)
        elif name == "luspo":
            total = total + tokens.sum() / len(logps)
        elif mean == "dr_grpo":
            total = total + tokens.sum() / (len(logps) * options["constant_length"])
        else:
            total = total + tokens.sum() / num_tokens
    return total


def _real(options: dict[str, Any], facts: SampleFacts, logps: Logps, starts: Logps) -> torch.Tensor:
    tau = options.get("tau", 0.5)
    scores = (
        torch.stack([(p - s).mean() for p, s in zip(logps, starts, strict=True)]).double() / tau
    )
    labels = torch.from_numpy(facts.labels)
    losses = []
    counted = 0
    for group in range(facts.num_groups):
        rows = torch.from_numpy(np.flatnonzero(facts.groups == group))
        s = scores[rows]
        y = labels[rows]
        if y.min() == y.max():
            continue
        if options["name"] == "real":
            losses.append((1 + (-s[y == 1]).exp().sum()).log() + (1 + s[y == 0].exp().sum()).log())
        else:
            losses.append(
                torch.nn.functional.binary_cross_entropy_with_logits(s, y, reduction="sum")
            )
            counted += len(rows)
    total = torch.stack(losses).sum()
    return total / (facts.num_groups if options["name"] == "real" else counted)
