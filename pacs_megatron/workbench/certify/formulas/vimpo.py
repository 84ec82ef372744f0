"""VIMPO (arXiv:2606.20008), from the authors' README and code (backprop07/VIMPO 2aa83bc)."""

from torch import Tensor

from pacs_megatron.workbench.certify.formulas.batch import (
    Batch,
    Metrics,
    Options,
    PerSample,
    zero,
)
from pacs_megatron.workbench.certify.formulas.critic import gae, whitened
from pacs_megatron.workbench.certify.formulas.policy_gradient import kl_estimate, policy_gradient


def vimpo(batch: Batch) -> tuple[Tensor, Metrics]:
    """L_V + actor_coef L_A of one mini-batch, whose advantages are `implicit_advantages`."""
    o = batch.options
    loss, metrics = policy_gradient(batch)
    value_loss = zero()
    kls = []
    for rows in batch.groups:
        for row in rows:
            log_ratio = batch.logprobs[row] - batch.frozen_logprobs[row]
            kl = kl_estimate(o["value_kl"], batch.logprobs[row], batch.frozen_logprobs[row])
            value = o["beta"] * (log_ratio - kl.detach()).sum()
            target = batch.rewards[row] - batch.rewards[rows].mean()
            value_loss = value_loss + 0.5 * (value - target) ** 2 / batch.size
            kls.append(kl.detach())

    metrics["vimpo/value_loss"] = (float(value_loss.detach()), float(batch.size))
    kl_sum = float(sum(kl.sum() for kl in kls))
    num_tokens = float(sum(batch.lens))
    metrics["vimpo/kl"] = (kl_sum / num_tokens, num_tokens)
    return loss + value_loss, metrics


def implicit_advantages(o: Options, starts: PerSample, frozen: PerSample) -> PerSample:
    """A of each token of a whole rollout batch, from log-probs at the step's start, whitened."""
    advantages = []
    for start, reference in zip(starts, frozen, strict=True):
        kl = kl_estimate(o["value_kl"], start, reference)
        terms = o["beta"] * (start - reference - kl)
        advantages.append(gae(terms, 0 * terms, 1.0, o["lam"]))
    return whitened(advantages)
