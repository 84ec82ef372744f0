"""The clipped policy gradients.

PPO arXiv:1707.06347, GRPO arXiv:2402.03300, DAPO arXiv:2503.14476, Dr. GRPO arXiv:2503.20783, GSPO
arXiv:2507.18071, LUSPO arXiv:2602.05261, CISPO arXiv:2506.13585, RLOO arXiv:2402.14740, REINFORCE++
arXiv:2501.03262, W-REINFORCE arXiv:2506.01347. Numbers in brackets are equations of the paper that
they follow.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pacs_megatron.workbench.certify.formulas.batch import (
    Batch,
    Metrics,
    Options,
    PerSample,
    mean_and_count,
    zero,
)


def policy_gradient(batch: Batch) -> tuple[Tensor, Metrics]:
    """The sum over trained tokens of u_i (w l(rho, A) + kl_coef k - entropy_coef H)."""
    advantages = token_advantages(batch)
    samples = [token_terms(batch, row, advantages[row]) for row in range(batch.size)]

    loss = zero()
    for row, terms in enumerate(samples):
        loss = loss + terms.loss.sum() / divisor(batch, row, advantages)
    return loss, metrics(batch, advantages, samples)


# The advantage A.


def token_advantages(batch: Batch) -> PerSample:
    """A of each token: a critic's, or the advantage of its sample."""
    if batch.advantages is not None:
        return batch.advantages

    of_samples = zip(sample_advantages(batch), batch.lens, strict=True)
    return [advantage.expand(length) for advantage, length in of_samples]


def sample_advantages(batch: Batch) -> Tensor:
    """A of each sample, [n]."""
    match batch.options["name"]:
        case "w_reinforce":
            return w_reinforce_advantages(batch)
        case "reinforce_pp":
            return reinforce_pp_advantages(batch.step or batch)[batch.rows]

    rewards = penalised_rewards(batch)
    advantages = torch.zeros_like(rewards)
    for rows in batch.groups:
        # Equal rewards have an advantage of exactly 0, also where their mean is rounded.
        is_equal = bool((rewards[rows] == rewards[rows[0]]).all())
        if not is_equal:
            advantages[rows] = group_advantages(rewards[rows], batch.options["name"])
    return advantages


def group_advantages(rewards: Tensor, name: str) -> Tensor:
    """A of one group from its rewards R, [G]."""
    match name:
        case "dr_grpo":
            return rewards - rewards.mean()
        case "rloo":
            advantages = []
            for i in range(len(rewards)):
                siblings = torch.cat([rewards[:i], rewards[i + 1 :]])
                advantages.append(rewards[i] - siblings.mean())
            return torch.stack(advantages)
        case _:
            # GRPO (section 4.1.2), DAPO (9), GSPO (6), CISPO.
            return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def reinforce_pp_advantages(step: Batch) -> Tensor:
    """REINFORCE++: R scaled over all tokens of the rollout batch, [n]."""
    rewards = penalised_rewards(step)
    if step.options["baseline"] == "group":
        for rows in step.groups:
            rewards[rows] = rewards[rows] - rewards[rows].mean()

    of_tokens = rewards.repeat_interleave(torch.tensor(step.lens))
    variance = of_tokens.var(correction=0).clamp(min=1e-8)
    return (rewards - of_tokens.mean()) / variance.sqrt()


def w_reinforce_advantages(batch: Batch) -> Tensor:
    """W-REINFORCE: a weight for each class; PSR and NSR train on one class. [n]."""
    y = batch.labels
    match batch.options["classes"]:
        case "positive":
            return y.clone()
        case "negative":
            return y - 1.0
        case _:
            weight = float(batch.options["positive_weight"])
            return weight * y - (1.0 - y)


def penalised_rewards(batch: Batch) -> Tensor:
    """R of each sample, [n], with DAPO's punishment of length and the KL of `kl_in: reward`."""
    o = batch.options
    rewards = batch.rewards.clone()
    for row, length in enumerate(batch.lens):
        if o.get("overlong_length") is not None:
            share = overlong_punishment(length, o["overlong_length"], o["overlong_buffer"])
            rewards[row] += o["overlong_penalty"] * share
        if o["kl_in"] == "reward":
            start = batch.start_logprobs[row]
            kl = kl_estimate(o["kl_estimator"], start, batch.frozen_logprobs[row])
            rewards[row] -= o["kl_coef"] * kl.sum()
    return rewards


def overlong_punishment(length: int, longest: int, buffer: int) -> float:
    """DAPO (13), between -1 and 0."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return (longest - buffer - length) / buffer
    return -1.0


# The loss of a token.


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """The tokens of one response, [response] each."""

    loss: Tensor
    """w l(rho, A) + kl_coef k - entropy_coef H, with graph"""
    is_clipped: Tensor
    """bool: the clip takes the gradient, or bounds the weight (CISPO)"""
    kl: Tensor
    """k, without graph"""
    importance: Tensor
    """w"""
    is_cut: Tensor
    """bool: w is a bound or 0 instead of the ratio"""


def token_terms(batch: Batch, row: int, advantage: Tensor) -> TokenTerms:
    """The terms of the loss of sample `row`, whose tokens have `advantage` [response]."""
    o = batch.options
    rho = policy_ratio(batch, row)
    high = 1 + o["clip_high"]
    if o["name"] == "cispo":
        loss, is_clipped = cispo_loss(rho, advantage, batch.logprobs[row], high)
    else:
        loss, is_clipped = clipped_loss(rho, advantage, 1 - o["clip_low"], high)

    importance, is_cut = importance_weight(batch, row)
    loss = importance * loss

    kl = torch.zeros_like(loss)
    if o["kl_coef"] > 0:
        kl = kl_estimate(o["kl_estimator"], batch.logprobs[row], batch.frozen_logprobs[row])
    if o["kl_in"] == "loss":
        loss = loss + o["kl_coef"] * kl
    if o["entropy_coef"] > 0:
        loss = loss - o["entropy_coef"] * batch.entropies[row]
    return TokenTerms(
        loss=loss,
        is_clipped=is_clipped,
        kl=kl.detach(),
        importance=importance,
        is_cut=is_cut,
    )


def clipped_loss(rho: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """l of PPO (7), GRPO (3), DAPO (8), GSPO (5), and whether the clip takes the gradient."""
    loss = -torch.minimum(rho * advantage, rho.clamp(low, high) * advantage)
    is_too_high = (advantage > 0) & (rho > high)
    is_too_low = (advantage < 0) & (rho < low)
    return loss, is_too_high | is_too_low


def cispo_loss(
    rho: Tensor, advantage: Tensor, logprob: Tensor, high: float
) -> tuple[Tensor, Tensor]:
    """l of CISPO (4), (5), whose clipped ratio is a weight without gradient, and where it clips."""
    weight = rho.detach().clamp(max=high)
    is_clipped = (rho > high) & (advantage != 0)
    return -weight * advantage * logprob, is_clipped


def policy_ratio(batch: Batch, row: int) -> Tensor:
    """rho = pi_theta / pi_step_start of each token, or of its response; [response]."""
    o = batch.options
    logprob = batch.logprobs[row]
    log_ratio = logprob - batch.start_logprobs[row]
    length = len(logprob)
    if o["name"] in ("gspo", "luspo"):
        of_response = log_ratio.mean().exp()  # GSPO (7)
        own = logprob
    elif o["name"] == "rloo":
        of_response = log_ratio.sum().exp()
        own = length * logprob
    else:
        return log_ratio.exp()

    if o["importance_level"] != "token":
        return of_response.expand(length)
    # A weight w for each token needs a term for each token. GSPO-token (section 4.3) gives it the
    # value of the response's ratio and the derivative by the token's own log-prob.
    return of_response.detach() * (own - own.detach()).exp()


def importance_weight(batch: Batch, row: int) -> tuple[Tensor, Tensor]:
    """w of each token, and whether it is a bound or 0 instead of the ratio; [response] each."""
    o = batch.options
    start = batch.start_logprobs[row]
    if o["importance"] == "none":
        return torch.ones_like(start), torch.zeros_like(start, dtype=torch.bool)

    log_ratio = start - batch.sampler_logprobs[row]
    if o["importance_level"] == "sequence":
        log_ratio = log_ratio.sum().expand(len(log_ratio))
    w = log_ratio.exp()
    cap = o["importance_cap"]
    floor = o["importance_floor"] or 0.0

    is_cut = (w > cap) | (w < floor)
    if o["importance"] == "mask":
        return torch.where(is_cut, 0.0, w), is_cut
    return w.clamp(max=cap), is_cut


def kl_estimate(estimator: str, logprob: Tensor, reference: Tensor) -> Tensor:
    """k of each token (joschu.net/blog/kl-approx.html; k3 is GRPO's (4))."""
    q = reference - logprob
    match estimator:
        case "k1":
            return -q
        case "k2":
            return q * q / 2
        case _:
            return torch.expm1(q) - q


# The mean.


def divisor(batch: Batch, row: int, advantages: PerSample) -> float:
    """1 / u_i, the divisor of the summed token losses of sample `row`."""
    n = batch.size
    length = batch.lens[row]
    match loss_mean(batch.options):
        case "sequence":  # GRPO (3), GSPO (5), RLOO
            return n * length
        case "sum":  # LUSPO
            return n
        case "dr_grpo":
            return n * int(batch.options["constant_length"])

    # DAPO (8). W-REINFORCE counts the tokens of the samples that it trains.
    trains_all = batch.options["name"] != "w_reinforce"
    lens = [len(a) for a in advantages if trains_all or bool(a.any())]
    return max(sum(lens), 1)


def loss_mean(o: Options) -> str:
    """The mean of an objective: fixed by its paper, or an option."""
    match o["name"]:
        case "gspo" | "rloo":
            return "sequence"
        case "luspo":
            return "sum"
        case "dr_grpo":
            return "dr_grpo"
        case "w_reinforce":
            return "token"
        case _:
            return str(o["loss_mean"])


def metrics(batch: Batch, advantages: PerSample, samples: list[TokenTerms]) -> Metrics:
    """The metrics of docs/objective.md."""
    o = batch.options
    sizes = torch.stack([advantage.abs().mean() for advantage in advantages])
    values = {
        "advantage_abs_mean": mean_and_count(sizes),
        "zero_advantage_frac": mean_and_count(sizes == 0),
        "clip_frac": mean_and_count(torch.cat([terms.is_clipped for terms in samples])),
    }
    if o["kl_coef"] > 0:
        values["kl"] = mean_and_count(torch.cat([terms.kl for terms in samples]))
    if o["importance"] != "none":
        corrected = [samples[row] for row in range(batch.size) if sizes[row] != 0]
        importance = [terms.importance for terms in corrected]
        is_cut = [terms.is_cut for terms in corrected]
        values["importance_mean"] = mean_and_count(torch.cat([torch.zeros(0), *importance]))
        values["importance_cut_frac"] = mean_and_count(torch.cat([torch.zeros(0), *is_cut]))
    return {f"{o['name']}/{name}": value for name, value in values.items()}
