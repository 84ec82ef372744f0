"""A plain training loop: transformers, autograd through the whole loss, torch's AdamW.

It uses none of the product's arithmetic: the losses are those of `certify`'s reference.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pacs_megatron.contracts import SampleFacts, TokenBuffers
from tests.support.policies.objective_reference import reference_loss
from tests.support.policies.policy_cases import OPTIMIZER

Logps = list[torch.Tensor]
"""Per sample, [response], nats"""
Loss = Callable[[Logps, Logps], torch.Tensor]
"""A loss with graph, from log-probs and entropies with graph"""


def plain_logprobs(
    model: Any, facts: SampleFacts, tokens: TokenBuffers, temperature: float = 1.0
) -> tuple[Logps, Logps]:
    """(log-probs, entropies), both with graph, of the tokens that the policy wrote, from plain
    transformers, one sample at a time, unpacked.
    """
    logps = []
    entropies = []
    for row in range(facts.num_samples):
        own = slice(tokens.offsets[row], tokens.offsets[row + 1])
        ids = torch.from_numpy(tokens.token_ids[own].astype(np.int64))
        places = np.flatnonzero(tokens.writers[own] == 1)
        logits = model(ids[None]).logits[0][places - 1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        distribution = torch.log_softmax(logits / temperature, dim=-1)
        logps.append(distribution.gather(1, ids[places, None])[:, 0])
        entropies.append(-(distribution.exp() * distribution).sum(-1))
    return logps, entropies


def loss_of(
    options: dict[str, Any],
    facts: SampleFacts,
    *,
    starts: Logps | None = None,
    references: Logps | None = None,
    samplers: Logps | None = None,
) -> Loss:
    """The reference's loss of an objective.

    Args:
        options: of the objective, without defaults.
        starts: log-probs at the start of the step; None: those of the update.
        references: log-probs of the frozen reference; None: those of the start.
        samplers: log-probs of the rollout engine; None: not used.
    """

    def loss(logps: Logps, entropies: Logps) -> torch.Tensor:
        value, _ = reference_loss(
            options,
            facts,
            logps,
            starts=starts,
            references=references,
            samplers=samplers,
            entropies=entropies,
        )
        return value

    return loss


def pacs_loss(starts: Logps, facts: SampleFacts) -> Loss:
    """PACS with its default options against the reference log-probs `starts`."""
    return loss_of({"name": "pacs"}, facts, starts=starts)


class PlainTrainer:
    """A transformers model and torch's AdamW; `clip` 0 disables clipping."""

    def __init__(
        self,
        folder: Path,
        *,
        clip: float = 1.0,
        temperature: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM

        # Not a default argument: tests in float64 replace this name of torch.
        own_dtype = torch.float32 if dtype is None else dtype
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=own_dtype)
        if dtype == torch.float64:
            # The default, grouped products, has no float64.
            self.model.set_experts_implementation("eager")
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
            logps, _ = plain_logprobs(self.model, facts, tokens, self.temperature)
        return logps

    def entropy_mean(self, facts: SampleFacts, tokens: TokenBuffers) -> float:
        """Over all response tokens."""
        with torch.no_grad():
            _, entropies = plain_logprobs(self.model, facts, tokens, self.temperature)
        return float(torch.cat(entropies).mean())

    def update(self, facts: SampleFacts, tokens: TokenBuffers, loss: Loss) -> tuple[float, float]:
        """One update. Returns (loss, gradient norm before clipping)."""
        self.optimizer.zero_grad()
        logps, entropies = plain_logprobs(self.model, facts, tokens, self.temperature)
        value = loss(logps, entropies)
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
