"""PPO with a critic as a plain training loop: transformers in float64, torch's AdamW.

Models, losses and advantages are those of `certify`'s reference, which imports nothing of the
product. The critic is transformers' class for token classification with one label. With experts the
policy's updates replay the experts of the step's start, as documented, and the critic selects its
own in each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pacs_megatron.contracts import SampleFacts, TokenBuffers
from pacs_megatron.workbench.certify.formulas import (
    PerSample,
    estimates,
    policy_gradient,
    value_loss,
)
from pacs_megatron.workbench.certify.reference_model import Model, Routes
from tests.support.policies.objective_reference import formula_batch, with_defaults
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
"""Clips so narrow that they apply within a few updates."""


class PpoTrainer:
    """Policy and critic, each with its AdamW."""

    def __init__(
        self, folder: Path, critic_folder: Path, options: dict[str, Any], critic_lr: float
    ) -> None:
        self.options = with_defaults(options)
        self.policy = Model(folder, 1.0)
        self.frozen = Model(folder, 1.0)
        self.critic = Model(critic_folder, 1.0)
        self.routes: dict[int, Routes] = {}
        """row -> the policy's experts of each layer at the step's start"""
        self.rates = {"policy": OPTIMIZER["lr"], "critic": critic_lr}
        self.optimizers = {
            "policy": _adamw(self.policy, self.rates["policy"]),
            "critic": _adamw(self.critic, self.rates["critic"]),
        }
        self.numbers: dict[str, list[tuple[float, float]]] = {"policy": [], "critic": []}
        """model -> (loss, gradient norm) of each update"""

    def step(
        self,
        facts: SampleFacts,
        tokens: TokenBuffers,
        minibatches: Sequence[list[int]],
        *,
        epochs: int = 1,
        warmup: int = 0,
        rates: Sequence[float] | None = None,
    ) -> None:
        """All updates of one step.

        Args:
            minibatches: rows of each update of an epoch.
            epochs: how often the mini-batches are trained.
            warmup: number of first updates without the policy.
            rates: factors of the learning rates, one for each update.
        """
        rows = list(range(facts.num_samples))
        with torch.no_grad():
            starts = [self._start_logprobs(tokens, facts, row) for row in rows]
            frozen = [self._logprobs(self.frozen, tokens, facts, row) for row in rows]
            values = [self._values(tokens, facts, row) for row in rows]
            batch = formula_batch(self.options, facts, starts, references=frozen)
            advantages, returns = estimates(batch, values)

        for number, part in enumerate(list(minibatches) * epochs):
            if rates is not None:
                self._set_rates(rates[number])
            if number >= warmup:
                self._update_policy(facts, tokens, part, starts, advantages)
            self._update_critic(facts, tokens, part, values, returns)

    def weights(self, model: Model) -> dict[str, np.ndarray]:
        """Under the names of a transformers checkpoint, with one tensor for each expert."""
        return model.named(model.parameters)

    def _update_policy(
        self,
        facts: SampleFacts,
        tokens: TokenBuffers,
        rows: list[int],
        starts: PerSample,
        advantages: PerSample,
    ) -> None:
        logprobs = []
        for row in rows:
            logprobs.append(self._logprobs(self.policy, tokens, facts, row, self.routes[row]))
        batch = formula_batch(
            self.options,
            facts.select(np.array(rows)),
            logprobs,
            starts=[starts[row] for row in rows],
        )
        batch.advantages = [advantages[row] for row in rows]
        loss, _ = policy_gradient(batch)
        self._step("policy", self.policy, loss)

    def _update_critic(
        self,
        facts: SampleFacts,
        tokens: TokenBuffers,
        rows: list[int],
        starts: PerSample,
        returns: PerSample,
    ) -> None:
        loss, _ = value_loss(
            self.options,
            [self._values(tokens, facts, row) for row in rows],
            [starts[row] for row in rows],
            [returns[row] for row in rows],
        )
        self._step("critic", self.critic, loss)

    def _step(self, name: str, model: Model, loss: Tensor) -> None:
        optimizer = self.optimizers[name]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters.values(), 1.0)
        optimizer.step()
        self.numbers[name].append((float(loss.detach()), float(norm)))

    def _set_rates(self, factor: float) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.param_groups[0]["lr"] = self.rates[name] * factor

    def _start_logprobs(self, tokens: TokenBuffers, facts: SampleFacts, row: int) -> Tensor:
        """The policy's log-probs of one sample; records its experts."""
        logprobs = self._logprobs(self.policy, tokens, facts, row)
        self.routes[row] = self.policy.chosen_routes()
        return logprobs

    def _logprobs(
        self,
        model: Model,
        tokens: TokenBuffers,
        facts: SampleFacts,
        row: int,
        routes: Routes | None = None,
    ) -> Tensor:
        """Log-probs of one sample's response tokens; `routes` None: the model selects experts."""
        own_routes: Routes = [None] * len(model.routers)
        logprobs, _ = model.sample(
            _ids(tokens, row), int(facts.prompt_lens[row]), routes or own_routes
        )
        return logprobs

    def _values(self, tokens: TokenBuffers, facts: SampleFacts, row: int) -> Tensor:
        return self.critic.values(_ids(tokens, row), int(facts.prompt_lens[row]))


def _ids(tokens: TokenBuffers, row: int) -> np.ndarray:
    ids: np.ndarray = tokens.token_ids[tokens.offsets[row] : tokens.offsets[row + 1]]
    return ids


def _adamw(model: Model, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters.values(),
        lr=lr,
        betas=(0.9, 0.95),
        eps=OPTIMIZER["adam_eps"],
        weight_decay=0.0,
    )
