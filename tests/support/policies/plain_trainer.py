"""A plain training loop as the reference: transformers, autograd through the whole loss, torch's
AdamW.

It uses none of the package's arithmetic: the losses are the formulas of objective.md on log-probs
with a graph.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pacs_megatron.contracts import SampleFacts, TokenBuffers
from tests.support.policies.policy_cases import OPTIMIZER, reference_pacs_loss

Logps = list[torch.Tensor]
"""Per sample, [response], nats"""
Loss = Callable[[Logps], torch.Tensor]


def plain_logprobs(
    model: Any, facts: SampleFacts, tokens: TokenBuffers, temperature: float = 1.0
) -> tuple[Logps, Logps]:
    """(log-probs, entropies), both with graph, of every sample from plain transformers, one sample
    at a time, unpacked.
    """
    logps = []
    entropies = []
    for row in range(facts.num_samples):
        ids = torch.from_numpy(
            tokens.token_ids[tokens.offsets[row] : tokens.offsets[row + 1]].astype(np.int64)
        )
        start = int(facts.prompt_lens[row])
        every = torch.log_softmax(
            model(ids[None]).logits[0].float()[start - 1 : -1] / temperature, dim=-1
        )
        logps.append(every.gather(1, ids[start:, None])[:, 0])
        entropies.append(-(every.exp() * every).sum(-1))
    return logps, entropies


def pacs_loss(starts: Logps, facts: SampleFacts, factors: list[float] | None = None) -> Loss:
    """(8) against the reference log-probs `starts`; `factors` multiply the samples' weights."""
    return lambda logps: reference_pacs_loss(logps, starts, facts, factors)


def grpo_loss(
    starts: Logps | None,
    references: Logps | None,
    facts: SampleFacts,
    kl_coef: float,
    clip: float = 0.2,
    *,
    factors: Logps | None = None,
) -> Loss:
    """Clipped ratio times (R - mean)/(std + 1e-6), mean over all tokens, plus kl_coef * k3.

    No `starts`: ratio 1. `factors` [response] of each sample multiply the first term.
    """
    advantages = np.empty(facts.num_samples)
    for group in np.unique(facts.groups):
        rows = facts.groups == group
        rewards = facts.rewards[rows]
        advantages[rows] = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)

    def loss(logps: Logps) -> torch.Tensor:
        terms = []
        for row, logp in enumerate(logps):
            ratio = (logp - (logp.detach() if starts is None else starts[row])).exp()
            advantage = float(advantages[row])
            term = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            if factors is not None:
                term = term * factors[row]
            if references is not None:
                difference = references[row] - logp
                term = term + kl_coef * (difference.exp() - difference - 1)
            terms.append(term)
        return torch.cat(terms).mean()

    return loss


def sft_loss(logps: Logps) -> torch.Tensor:
    """Mean negative log-likelihood over all response tokens."""
    return -torch.cat(logps).mean()


class PlainTrainer:
    """A transformers model and torch's AdamW; `clip` 0 disables clipping."""

    def __init__(self, folder: Path, *, clip: float = 1.0, temperature: float = 1.0) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.clip = clip
        self.temperature = temperature
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=OPTIMIZER["lr"],
            betas=(0.9, 0.95),
            eps=OPTIMIZER["adam_eps"],
            weight_decay=0.0,
        )

    def logprobs(self, facts: SampleFacts, tokens: TokenBuffers) -> Logps:
        """Without graph."""
        with torch.no_grad():
            return plain_logprobs(self.model, facts, tokens, self.temperature)[0]

    def entropy_mean(self, facts: SampleFacts, tokens: TokenBuffers) -> float:
        """Over all response tokens."""
        with torch.no_grad():
            return float(
                torch.cat(plain_logprobs(self.model, facts, tokens, self.temperature)[1]).mean()
            )

    def update(
        self,
        facts: SampleFacts,
        tokens: TokenBuffers,
        loss: Loss | Callable[[Logps, Logps], torch.Tensor],
    ) -> tuple[float, float]:
        """One update.

        Returns (loss, gradient norm before clipping). A loss with two arguments receives the
        entropies too.
        """
        self.optimizer.zero_grad()
        found = plain_logprobs(self.model, facts, tokens, self.temperature)
        value = loss(*found[: len(inspect.signature(loss).parameters)])
        value.backward()  # type: ignore[no-untyped-call]
        limit = self.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        return float(value.detach()), float(norm)

    def reset_moments(self) -> None:
        """A new AdamW on the same weights."""
        self.optimizer.state.clear()

    def weights(self) -> dict[str, np.ndarray]:
        """Weights under the names of a transformers checkpoint, with one tensor per expert."""
        from safetensors.numpy import load_file

        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            return load_file(Path(folder) / "model.safetensors")
