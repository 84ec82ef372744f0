"""The share of one micro-batch in an update: the objective's loss, sums to report, and the scores that it reproduces."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pacs_megatron.contracts import MiniBatch, Objective, Prepared
from pacs_megatron.policy.microbatch import MicroBatch, build_record

MAX_LOG_RATIO = 60.0
"""Nats; exponents are cut here, so that sums stay within fp32. Beyond it the circuit breaker has to see finite figures."""


@dataclass(slots=True, kw_only=True)
class UpdateLoss:
    """The loss function of one update's forward_backward."""

    minibatch: MiniBatch
    prepared: Prepared
    objective: Objective
    with_scores: bool
    """a score pass came first: compute r_j again, to see whether this forward reproduces it"""
    mismatch_threshold: float
    """nats; tokens whose log-prob differs by more from the sampler's are counted"""
    scores: dict[int, float] = field(default_factory=dict)
    """row -> r_j of the micro-batches seen so far"""

    def __call__(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss to back-propagate, sums over this rank's tokens to report)"""
        record = build_record(self.minibatch, batch, logprobs, entropy, gathered=False)
        loss = (self.objective.token_loss(record, self.prepared) * record.mask).sum()
        with torch.no_grad():
            assert record.sampler_logprobs is not None
            report = {
                "sum/loss": loss.detach().clone(),
                "sum/entropy": (entropy * record.mask).sum(),
                "sum/logprob": (logprobs * record.mask).sum(),
                "sum/tokens": record.mask.sum(),
            }
            report |= self._mismatch((logprobs - record.sampler_logprobs) * record.mask)
            for name, value in self.objective.token_metrics(record, self.prepared).items():
                report[name] = (value * record.mask).sum()
            if self.with_scores:
                self.scores.update(score_sums(self.minibatch, batch, batch.gather(logprobs.detach()), self.objective))
        return loss, report

    def _mismatch(self, log_ratio: Tensor) -> dict[str, Tensor]:
        """`log_ratio` [k], log pi_trainer - log pi_sampler of the sampled tokens, nats. KL by the k3 estimator."""
        distance = log_ratio.abs()
        bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
        largest = distance.max() if distance.numel() else distance.new_zeros(())
        return {
            "sum/mismatch_abs": distance.sum(),
            "sum/mismatch_ratio": log_ratio.sum(),
            "sum/mismatch_kl": (bounded.exp() - 1 - log_ratio).sum(),
            "sum/mismatch_over": (distance > self.mismatch_threshold).float().sum(),
            "max/mismatch_abs": largest,
        }


@torch.no_grad()
def score_sums(minibatch: MiniBatch, batch: MicroBatch, logprobs: Tensor, objective: Objective) -> dict[int, float]:
    """Row -> sum of the masked token scores; `logprobs` [k] are gathered. Accumulated in fp64, in token order."""
    record = build_record(minibatch, batch, logprobs.detach(), None, gathered=True)
    values = (objective.token_scores(record).double() * record.mask.double()).cpu().numpy()
    bounds = np.concatenate([[0], np.cumsum(batch.response_lens)])
    return {
        int(row): float(np.sum(values[start:stop]))
        for row, start, stop in zip(batch.rows, bounds[:-1], bounds[1:], strict=True)
    }
