"""The formulas of docs/objective.md for `certify`'s reference, in float64 by autograd, without
pacs_megatron.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Logps = list[Tensor]
"""Per sample, float64 [response], nats"""
Metrics = dict[str, tuple[float, float]]
"""name -> (value, denominator); no value if the denominator is 0"""


@dataclass(kw_only=True)
class Batch:
    """One mini-batch. `logps` has a graph; the others have none."""

    options: Mapping[str, Any]
    """the section `objective` of the configuration"""
    groups: list[list[int]]
    """rows of each group"""
    labels: Tensor
    rewards: Tensor
    logps: Logps
    starts: Logps
    frozen: Logps
    sampler: Logps
    """log-probs of the policy at the start of the step, of the frozen reference, and of the sampler
    """
    entropies: list[Tensor]
    """of the whole distributions, float64 [response], with graph"""
    rows: list[int]
    """of the step's rollout batch"""
    step: "Batch | None" = None
    """the whole rollout batch, with log-probs of the step's start"""
    advantages: list[Tensor] | None = None
    """of tokens, with a critic"""

    @property
    def lens(self) -> Tensor:
        return torch.tensor([float(len(logp)) for logp in self.logps], dtype=torch.float64)


def pacs(batch: Batch) -> tuple[Tensor, Metrics]:
    """docs/objective.md, PACS: proxy (7), score (6), weight (3.5), loss (2) and (8), actor term
    (5), stale rollouts.
    """
    o = batch.options
    n = len(batch.logps)
    if o["reward_proxy"] == "mean_log_prob":
        proxy = torch.stack([o["beta"] * logp.mean() for logp in batch.logps])
    else:
        against = batch.frozen if o["reference"] == "frozen" else batch.starts
        pairs = zip(batch.logps, against, strict=True)
        proxy = torch.stack([o["beta"] * (logp - base).sum() for logp, base in pairs])
    psi = [proxy.new_zeros(())] * n
    weight = torch.ones(n, dtype=torch.float64)
    for rows in batch.groups:
        for row, value in zip(rows, _pacs_scores(proxy[rows], o), strict=True):
            label = float(batch.labels[row])
            same = int((batch.labels[rows] == batch.labels[row]).sum())
            question = 1.0 if same == len(rows) else len(rows) / (2 * same)
            kinds = {
                "question": question,
                "only_positive": label,
                "only_negative": 1 - label,
                "none": 1.0,
            }
            psi[row] = value
            weight[row] = kinds[o["weighting"]]
    score = torch.stack(psi)
    metrics = Metrics()
    if o["importance_cap"] is not None:
        ratios = [
            (start - old).mean().exp()
            for start, old in zip(batch.starts, batch.sampler, strict=True)
        ]
        factor = torch.stack(ratios).clamp(max=o["importance_cap"])
        weight = weight * factor
        metrics["pacs/importance_mean"] = (float(factor.mean()), n)
        metrics["pacs/importance_capped_frac"] = (
            float((factor >= o["importance_cap"]).double().mean()),
            n,
        )
    loss = weight * torch.nn.functional.binary_cross_entropy_with_logits(
        score, batch.labels, reduction="none"
    )
    total = loss.sum() / n
    for rows in batch.groups if o["actor_term"] > 0 else ():
        for row in rows:
            seen = loss[rows if o["actor_scope"] == "group" else row].detach().sum()
            total = total + o["actor_term"] / (n * o["beta"]) * seen * (
                proxy[row] - proxy[row].detach()
            )
    found = score.detach()
    labels = batch.labels
    for name, chosen in (("pos", found[labels == 1]), ("neg", found[labels == 0])):
        metrics[f"pacs/psi_mean_{name}"] = (
            float(chosen.mean()) if len(chosen) else 0.0,
            len(chosen),
        )
    metrics["pacs/residual_mean"] = (float((found.sigmoid() - labels).abs().mean()), n)
    metrics["pacs/psi_over_8_frac"] = (float((found.abs() > 8).double().mean()), n)
    one_class = [len(set(labels[rows].tolist())) == 1 for rows in batch.groups]
    metrics["pacs/one_class_group_frac"] = (sum(one_class) / len(one_class), len(one_class))
    return total, metrics


def _pacs_scores(r: Tensor, o: Mapping[str, Any]) -> Sequence[Tensor]:
    """psi of one group from its proxies."""
    if o["score"] == "rloo":
        return [value - (r.sum() - value) / (len(r) - 1) for value in r]
    if o["score"] != "grpo":
        return list(r if o["score"] == "naive" else r - r.mean())
    floor = o["score_std_floor"] or 0.0
    scale = torch.tensor(floor) if float(r.detach().std()) <= floor else r.std()
    return list((r - r.mean()) / (scale + 1e-6))


def _kl(estimator: str, logp: Tensor, reference: Tensor) -> Tensor:
    q = reference - logp
    return -q if estimator == "k1" else 0.5 * q * q if estimator == "k2" else torch.expm1(q) - q


def _rewards(batch: Batch) -> Tensor:
    """[n], after the penalties."""
    o = batch.options
    rewards = batch.rewards.clone()
    if o.get("overlong_length") is not None:
        excess = (batch.lens - o["overlong_length"] + o["overlong_buffer"]) / o["overlong_buffer"]
        rewards = rewards - o["overlong_penalty"] * excess.clamp(0.0, 1.0)
    if o["kl_in"] == "reward":
        pairs = zip(batch.starts, batch.frozen, strict=True)
        rewards = rewards - o["kl_coef"] * torch.stack(
            [_kl(o["kl_estimator"], *pair).sum() for pair in pairs]
        )
    return rewards


def _scaled_over_the_step(step: Batch) -> Tensor:
    """REINFORCE++: mean and standard deviation over all tokens of the rollout batch."""
    shifted = _rewards(step)
    share = step.lens / step.lens.sum()
    for rows in step.groups if step.options["baseline"] == "group" else ():
        shifted[rows] = shifted[rows] - shifted[rows].mean()
    centred = shifted - (shifted * share).sum()
    return centred / (centred.square() * share).sum().clamp(min=1e-8).sqrt()


def _advantages(batch: Batch) -> Tensor:
    """[n]"""
    o = batch.options
    name = batch.options["name"]
    if name == "w_reinforce":  # of wrong and of correct samples
        kinds = {
            "both": (-1.0, o["positive_weight"]),
            "positive": (0.0, 1.0),
            "negative": (-1.0, 0.0),
        }
        return torch.tensor(kinds[o["classes"]], dtype=torch.float64)[batch.labels.long()]
    if name == "reinforce_pp" and batch.step is not None:
        return _scaled_over_the_step(batch.step)[batch.rows]
    rewards = _rewards(batch)
    kind = name if name in ("dr_grpo", "rloo") else "grpo"
    advantage = torch.zeros_like(rewards)
    for rows in batch.groups:
        own = rewards[rows]
        if len(set(own.tolist())) > 1:  # else every advantage is 0
            for row in rows:
                others = (own.sum() - rewards[row]) / (len(rows) - 1)
                centre = others if kind == "rloo" else own.mean()
                scale = own.std() + 1e-6 if kind == "grpo" else 1.0
                advantage[row] = (rewards[row] - centre) / scale
    return advantage


def policy_gradient(batch: Batch) -> tuple[Tensor, Metrics]:
    """docs/objective.md, policy gradients."""
    o = batch.options
    n = len(batch.logps)
    name = batch.options["name"]
    of_tokens = batch.advantages
    advantage = (
        _advantages(batch)
        if of_tokens is None
        else torch.stack([a.abs().mean() for a in of_tokens])
    )
    is_counted = advantage != 0 if name == "w_reinforce" else torch.ones(n, dtype=torch.bool)
    tokens = float(batch.lens.sum())
    total = torch.zeros((), dtype=torch.float64)
    clipped = 0.0
    kl = 0.0
    weights = 0.0
    cut = 0.0
    corrected = 0.0
    for row, (logp, a) in enumerate(zip(batch.logps, of_tokens or list(advantage), strict=True)):
        # With a sample's ratio and a weight per token, each token has the sample's loss and its own
        # derivative.
        by_token = name in ("gspo", "luspo", "rloo") and o["importance"] != "none"
        own = logp.detach().requires_grad_() if by_token else logp
        log_ratio = own - batch.starts[row]
        ones = torch.ones_like(own)
        of_samples = {"gspo": log_ratio.mean(), "luspo": log_ratio.mean(), "rloo": log_ratio.sum()}
        ratio = ones * of_samples.get(name, log_ratio).exp()
        low = 1 - o.get("clip_low", 1.0)
        high = 1 + o["clip_high"]
        loss = -torch.minimum(ratio * a, ratio.clamp(low, high) * a)
        if name == "cispo":
            loss = -ratio.clamp(max=high).detach() * a * logp
        is_high = ratio > high
        is_low = (ratio < low) & (name != "cispo")
        clipped += int(
            ((is_high & ((a > 0) | (name == "cispo")) | is_low & (a < 0)) & (a != 0)).sum()
        )
        if o["importance"] != "none":
            w = batch.starts[row] - batch.sampler[row]
            w = ones.detach() * (w.sum() if o["importance_level"] == "sequence" else w).exp()
            outside = (w > o["importance_cap"]) | (w < (o["importance_floor"] or 0.0))
            factor = (
                w.clamp(max=o["importance_cap"]) if o["importance"] == "truncate" else w * ~outside
            )
            if by_token:
                loss = loss.detach() + torch.autograd.grad(loss.sum(), own)[0] * (
                    logp - logp.detach()
                )
            loss = loss * factor
            if bool((a != 0).any()):
                weights = weights + float(factor.sum())
                cut = cut + int(outside.sum())
                corrected = corrected + len(w)
        if o["kl_coef"] > 0:
            estimate = _kl(o["kl_estimator"], logp, batch.frozen[row])
            loss = loss + o["kl_coef"] * estimate * (o["kl_in"] == "loss")
            kl = kl + float(estimate.detach().sum())
        if o["entropy_coef"] > 0:
            loss = loss - o["entropy_coef"] * batch.entropies[row]
        counted = max(float(batch.lens[is_counted].sum()), 1.0)
        constant = o.get("constant_length") or 1
        divisor = {"token": counted, "sequence": n * len(logp), "sum": n, "dr_grpo": n * constant}
        means = {"gspo": "sequence", "rloo": "sequence", "luspo": "sum", "dr_grpo": "dr_grpo"}
        total = total + loss.sum() / divisor[means.get(name, o.get("loss_mean", "token"))]
    metrics: Metrics = {
        "advantage_abs_mean": (float(advantage.abs().mean()), n),
        "zero_advantage_frac": (float((advantage == 0).double().mean()), n),
        "clip_frac": (clipped / tokens, tokens),
    }
    if o["kl_coef"] > 0:
        metrics["kl"] = (kl / tokens, tokens)
    if o["importance"] != "none":
        sums = {"importance_mean": weights, "importance_cut_frac": cut}
        metrics |= {key: (value / max(corrected, 1), corrected) for key, value in sums.items()}
    return total, {f"{name}/{key}": value for key, value in metrics.items()}


def estimates(batch: Batch, values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(whitened advantages, returns) of a whole rollout batch, docs/objective.md, PPO."""
    o = batch.options
    advantages = []
    returns = []
    for row, value in enumerate(values):
        rewards = torch.zeros_like(value)
        if o["kl_in"] == "reward":
            rewards -= o["kl_coef"] * _kl(o["kl_estimator"], batch.starts[row], batch.frozen[row])
        rewards[-1] += batch.rewards[row]
        delta = (
            rewards
            + o["gamma"] * torch.cat([value[1:], torch.zeros(1, dtype=torch.float64)])
            - value
        )
        steps = torch.arange(len(value))
        ahead = (steps[None] - steps[:, None]).clamp(min=0).double()
        advantages.append(
            ((o["gamma"] * o["lam"]) ** ahead * (steps[None] >= steps[:, None])) @ delta
        )
        returns.append(advantages[-1] + value)
    every = torch.cat(advantages)
    return [(a - every.mean()) / (every.var() + 1e-8).sqrt() for a in advantages], returns


def value_loss(
    o: Mapping[str, Any], values: list[Tensor], starts: list[Tensor], returns: list[Tensor]
) -> tuple[Tensor, Metrics]:
    """The critic's loss of one mini-batch, docs/objective.md, PPO."""
    tokens = sum(len(value) for value in values)
    total = torch.zeros((), dtype=torch.float64)
    clipped = 0
    for value, start, target in zip(values, starts, returns, strict=True):
        bound = o["value_clip"] or math.inf
        near = value.clamp(
            start - bound, start + bound
        )  # the value itself within the bound, without rounding
        clipped += int(((near - target) ** 2 > (value - target) ** 2).sum())
        constant = len(values) * (o["constant_length"] or 1)
        divisor = {"token": tokens, "sequence": len(values) * len(value)}.get(
            o["loss_mean"], constant
        )
        total = (
            total + 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2).sum() / divisor
        )
    found = torch.cat(values).detach()
    target = torch.cat(returns)
    spread = target.var(correction=0)
    explained = 1 - (target - found).var(correction=0) / spread if spread > 1e-8 else 0.0
    means = {
        "value_mean": found.mean(),
        "return_mean": target.mean(),
        "explained_variance": explained,
    }
    metrics = {f"critic/{name}": (float(value), float(tokens)) for name, value in means.items()}
    return total, metrics | {"critic/clip_frac": (clipped / tokens, float(tokens))}


def real(batch: Batch) -> tuple[Tensor, Metrics]:
    """docs/objective.md, REAL and its BCE variant."""
    o = batch.options
    groups = len(batch.groups)
    mixed = [rows for rows in batch.groups if 0 < float(batch.labels[rows].mean()) < 1]
    total = 0.0 * torch.cat(batch.logps).sum()  # a graph, where every group has one class
    for rows in mixed:
        s = torch.stack([(batch.logps[row] - batch.starts[row]).mean() / o["tau"] for row in rows])
        y = batch.labels[rows]
        if o["name"] == "real_bce":
            total = total + torch.nn.functional.binary_cross_entropy_with_logits(
                s, y, reduction="sum"
            )
        else:
            total = (
                total + torch.log1p((-s[y == 1]).exp().sum()) + torch.log1p(s[y == 0].exp().sum())
            )
    metrics: Metrics = {f"{o['name']}/one_class_group_frac": (1 - len(mixed) / groups, groups)}
    return total / (groups if o["name"] == "real" else max(sum(map(len, mixed)), 1)), metrics


def sft(batch: Batch) -> tuple[Tensor, Metrics]:
    """Mean negative log-likelihood over tokens, or the mean of each response's mean."""
    means = torch.stack([logp.mean() for logp in batch.logps])
    return -(torch.cat(batch.logps) if batch.options["loss_mean"] == "token" else means).mean(), {}


_KIN = (
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "luspo",
    "cispo",
    "rloo",
    "w_reinforce",
    "reinforce_pp",
    "ppo",
)
OBJECTIVES: dict[str, Callable[[Batch], tuple[Tensor, Metrics]]] = {"pacs": pacs, "sft": sft}
OBJECTIVES |= dict.fromkeys(_KIN, policy_gradient) | dict.fromkeys(("real", "real_bce"), real)


def skips_zero_gradient(o: Mapping[str, Any]) -> bool:
    """Whether a step's first update leaves samples out whose gradient is exactly 0
    (docs/metrics.md).
    """
    if o["name"] == "pacs":
        return bool(o["reference"] == "step_start" and o["importance_cap"] is None)
    needs_all = o["name"] == "sft" or o.get("kl_coef", 0) > 0 or o.get("entropy_coef", 0) > 0
    return not needs_all and o.get("importance_level") != "sequence"


def without_gradient(batch: Batch, slopes: Sequence[Tensor]) -> list[bool]:
    """Whether each sample's gradient is 0 by its group; ignores samples with masked tokens only
    (`importance: mask`).
    """
    if OBJECTIVES[batch.options["name"]] is policy_gradient:
        return [not bool(a.any()) for a in batch.advantages or _advantages(batch)]
    least = 1e-12 * max(float(slope.abs().max()) for slope in slopes)
    return [float(slope.abs().max()) <= least for slope in slopes]


def passes(o: Mapping[str, Any], index: int) -> Metrics:
    """Forward-only log-prob passes of update `index` (docs/objective.md)."""
    if o["name"] == "pacs":
        start = o["reference"] == "step_start" or o["importance_cap"] is not None
        frozen = o["reference"] == "frozen"
    else:
        start = o["name"] != "sft"
        frozen = o.get("kl_coef", 0.0) > 0
    later = index > 0 or o.get("kl_in") == "reward"
    return {
        "passes/step_start": (float(start and later), 1.0),
        "passes/reference": (float(frozen), 1.0),
    }


def token_metrics(
    logps: Tensor, entropies: Tensor, sampler: Tensor, case: Mapping[str, Any]
) -> Metrics:
    """docs/metrics.md: policy/* and mismatch/* over the tokens of the update's forward pass."""
    count = float(len(logps))
    q = logps - sampler
    found = {"policy/entropy": entropies.mean(), "policy/logprob_mean": logps.mean()}
    if case["is_sampled"]:
        found |= {
            "mismatch/logprob_abs_mean": q.abs().mean(),
            "mismatch/logprob_abs_max": q.abs().max(),
            "mismatch/ratio": q.mean().exp(),
            "mismatch/kl": (q.exp() - 1 - q).mean(),
            "mismatch/over_frac": (q.abs() > case["mismatch_threshold"]).double().mean(),
        }
    return {name: (float(value), count) for name, value in found.items()}
