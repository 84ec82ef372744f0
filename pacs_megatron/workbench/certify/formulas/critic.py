"""PPO's critic: GAE (arXiv:1506.02438), and whitening and value loss of the authors' baseline
(verl's torch_functional.py and core_algos.py).
"""

import math

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
from pacs_megatron.workbench.certify.formulas.policy_gradient import kl_estimate


def estimates(batch: Batch, values: PerSample) -> tuple[PerSample, PerSample]:
    """(whitened advantages, returns) of a whole rollout batch, from the critic's values V at the
    start of the step.
    """
    o = batch.options
    advantages = []
    returns = []
    for row, value in enumerate(values):
        advantage = gae(token_rewards(batch, row), value, o["gamma"], o["lam"])
        advantages.append(advantage)
        returns.append(advantage + value)
    return whitened(advantages), returns


def token_rewards(batch: Batch, row: int) -> Tensor:
    """r_t of sample `row`, [response]: the verifier's number at the last token, and the KL of
    `kl_in: reward` at each.
    """
    o = batch.options
    start = batch.start_logprobs[row]
    rewards = torch.zeros_like(start)
    if o["kl_in"] == "reward":
        kl = kl_estimate(o["kl_estimator"], start, batch.frozen_logprobs[row])
        rewards -= o["kl_coef"] * kl
    rewards[-1] += batch.rewards[row]
    return rewards


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE (16) of one response: A_t = sum over l of (gamma lam)^l delta_{t+l}, with delta_t = r_t +
    gamma V_{t+1} - V_t. No value follows the last token. [response] each.
    """
    length = len(values)
    advantages = []
    for t in range(length):
        advantage = zero()
        for k in range(t, length):
            following = values[k + 1] if k + 1 < length else 0.0
            delta = rewards[k] + gamma * following - values[k]
            advantage = advantage + (gamma * lam) ** (k - t) * delta
        advantages.append(advantage)
    return torch.stack(advantages)


def whitened(advantages: PerSample) -> PerSample:
    """verl's masked_whiten over all tokens: unbiased variance plus 1e-8."""
    of_all = torch.cat(advantages)
    scale = (of_all.var() + 1e-8).sqrt()
    return [(advantage - of_all.mean()) / scale for advantage in advantages]


def value_loss(
    o: Options, values: PerSample, starts: PerSample, returns: PerSample
) -> tuple[Tensor, Metrics]:
    """The critic's loss of one mini-batch: value_coef max((V - G)^2, (clip(V) - G)^2).

    Args:
        values: V of each token, with graph.
        starts: V at the start of the step; the clip keeps V within `value_clip` of it.
        returns: G.
    """
    bound = math.inf if o["value_clip"] is None else o["value_clip"]
    loss = zero()
    is_clipped = []
    for value, start, target in zip(values, starts, returns, strict=True):
        near = value.clamp(start - bound, start + bound)
        error = (value - target) ** 2
        near_error = (near - target) ** 2
        largest = torch.maximum(error, near_error)
        loss = loss + o["value_coef"] * largest.sum() / divisor(o, values, value)
        is_clipped.append(near_error > error)

    values_and_returns = metrics(torch.cat(values).detach(), torch.cat(returns))
    return loss, values_and_returns | {"critic/clip_frac": mean_and_count(torch.cat(is_clipped))}


def divisor(o: Options, values: PerSample, value: Tensor) -> float:
    """The divisor of the summed token losses of the sample with `value`."""
    n = len(values)
    match o["loss_mean"]:
        case "sequence":
            return n * len(value)
        case "dr_grpo":
            return n * int(o["constant_length"])
        case _:
            return sum(len(other) for other in values)


def metrics(values: Tensor, returns: Tensor) -> Metrics:
    """The metrics of docs/objective.md over all tokens; explained variance 1 - var(G - V) / var(G),
    or 0 where all returns are equal.
    """
    spread = returns.var(correction=0)
    explained = zero()
    if spread > 1e-8:
        explained = 1 - (returns - values).var(correction=0) / spread
    return {
        "critic/value_mean": mean_and_count(values),
        "critic/return_mean": mean_and_count(returns),
        "critic/explained_variance": (float(explained), float(len(values))),
    }
