"""PPO with a critic as the papers write it: transformers in float64, autograd through whole
mini-batches, torch's AdamW.

The critic is transformers' class for token classification with one label. GAE is the double sum of
its definition. Both models are those of `certify`'s reference, which imports nothing of the
package: with experts the policy's updates replay the choice of the step's start, as documented, and
the critic chooses in each pass. Of the package it uses data classes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pacs_megatron.contracts import SampleFacts, TokenBuffers
from pacs_megatron.workbench.certify.reference import Model
from tests.support.policies.policy_cases import OPTIMIZER

PPO: dict[str, Any] = {
    "name": "ppo",
    "gamma": 0.97,
    "lam": 0.9,
    "clip_low": 0.02,
    "clip_high": 0.02,
    "value_clip": 0.03,
    "kl_coef": 0.1,
    "kl_estimator": "k1",
    "kl_in": "reward",
}
"""Clips so narrow that they bind within a few updates."""


def gae_by_definition(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float
) -> list[float]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}; no value after the last token."""
    length = len(values)
    delta = [
        rewards[t] + (gamma * values[t + 1] if t + 1 < length else 0.0) - values[t]
        for t in range(length)
    ]
    return [
        sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)
    ]


def whitened(advantages: Sequence[Tensor]) -> list[Tensor]:
    """verl's and TRL's masked_whiten over all tokens: unbiased variance plus 1e-8."""
    every = torch.cat(list(advantages))
    return [(a - every.mean()) / (every.var() + 1e-8).sqrt() for a in advantages]


class PpoReference:
    """Policy and critic, each with its AdamW."""

    def __init__(
        self, folder: Path, critic_folder: Path, options: dict[str, Any], critic_lr: float
    ) -> None:
        self.options = options
        self.policy = Model(folder, 1.0)
        self.frozen = Model(folder, 1.0)
        self.critic = Model(critic_folder, 1.0)
        self.routes: dict[int, list[Tensor | None]] = {}
        """row -> the policy's experts of each layer at the step's start"""
        settings = {"betas": (0.9, 0.95), "eps": OPTIMIZER["adam_eps"], "weight_decay": 0.0}
        self.optimizers = {
            id(model): (torch.optim.AdamW(model.parameters.values(), lr=lr, **settings), lr)
            for model, lr in ((self.policy, OPTIMIZER["lr"]), (self.critic, critic_lr))
        }
        self.numbers: dict[str, list[tuple[float, float]]] = {"policy": [], "critic": []}

    def run(
        self,
        model: Model,
        tokens: TokenBuffers,
        facts: SampleFacts,
        row: int,
        *,
        replays: bool = False,
    ) -> Tensor:
        """Log-probs or values of one sample's response tokens.

        `replays`: with the policy's experts of the step's start.
        """
        ids = tokens.token_ids[tokens.offsets[row] : tokens.offsets[row + 1]]
        prompt_len = int(facts.prompt_lens[row])
        if model is self.critic:
            return model.values(ids, prompt_len)
        logps, _ = model.sample(
            ids, prompt_len, self.routes[row] if replays else [None] * len(model.routers)
        )
        if model is self.policy and not replays:
            self.routes[row] = [router.chosen for router in model.routers]
        return logps

    def step(
        self,
        facts: SampleFacts,
        tokens: TokenBuffers,
        minibatches: Sequence[Sequence[int]],
        *,
        epochs: int = 1,
        warmup: int = 0,
        rates: Sequence[float] | None = None,
    ) -> None:
        """All updates of one step.

        `warmup`: first ones without the policy. `rates`: factors of the learning rates.
        """
        o = self.options
        rows = range(facts.num_samples)
        with torch.no_grad():
            starts, frozen, values = (
                [self.run(model, tokens, facts, row) for row in rows]
                for model in (self.policy, self.frozen, self.critic)
            )
        advantages = []
        returns = []
        for row in rows:
            rewards = -o.get("kl_coef", 0.0) * (starts[row] - frozen[row])
            rewards[-1] += facts.rewards[row]
            found = gae_by_definition(rewards.tolist(), values[row].tolist(), o["gamma"], o["lam"])
            advantages.append(torch.tensor(found, dtype=torch.float64))
            returns.append(advantages[-1] + values[row])
        white = whitened(advantages)
        for number, part in enumerate([part for _ in range(epochs) for part in minibatches]):
            if rates is not None:
                for optimizer, lr in self.optimizers.values():
                    optimizer.param_groups[0]["lr"] = lr * rates[number]
            count = sum(len(values[row]) for row in part)
            if number >= warmup:
                loss = torch.zeros((), dtype=torch.float64)
                for row in part:
                    ratio = (
                        self.run(self.policy, tokens, facts, row, replays=True) - starts[row]
                    ).exp()
                    bounded = ratio.clamp(1 - o["clip_low"], 1 + o["clip_high"])
                    loss = (
                        loss - torch.minimum(ratio * white[row], bounded * white[row]).sum() / count
                    )
                self._update("policy", self.policy, loss)
            loss = torch.zeros((), dtype=torch.float64)
            for row in part:
                value = self.run(self.critic, tokens, facts, row)
                bound = o["value_clip"]
                near = values[row] + (value - values[row]).clamp(-bound, bound)
                worst = torch.maximum((value - returns[row]) ** 2, (near - returns[row]) ** 2)
                loss = loss + 0.5 * worst.sum() / count
            self._update("critic", self.critic, loss)

    def _update(self, name: str, model: Model, loss: Tensor) -> None:
        optimizer = self.optimizers[id(model)][0]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters.values(), 1.0)
        optimizer.step()
        self.numbers[name].append((float(loss.detach()), float(norm)))

    def weights(self, model: Model) -> dict[str, np.ndarray]:
        """Under the names of a transformers checkpoint, with one tensor for each expert."""
        return model.named(model.parameters)
