"""The reference for the closed forms of PACS: one loop per group, autograd in float64.

It uses data classes of the package, but none of its arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.objectives.shared.base import Objective

EPS = 1e-6


@dataclass(kw_only=True)
class Batch:
    """A mini-batch with its tokens: facts [n], flat token tensors [t], float64."""

    facts: SampleFacts
    logprobs: torch.Tensor
    reference: torch.Tensor
    mask: torch.Tensor
    sample_of_token: torch.Tensor
    sampler: torch.Tensor | None = None
    """log-probs of the sampler"""
    step_start: torch.Tensor | None = None
    """None: `reference`"""

    def record(
        self, tokens: torch.Tensor | None = None, logprobs: torch.Tensor | None = None
    ) -> TokenRecord:
        """The tokens `tokens` (default: all); `logprobs` [t] of the whole batch replace the stored
        ones.
        """
        rows = torch.arange(len(self.mask)) if tokens is None else tokens
        source = self.logprobs if logprobs is None else logprobs
        return TokenRecord(
            logprobs=source[rows],
            mask=self.mask[rows],
            sample_of_token=self.sample_of_token[rows],
            response_lens=torch.from_numpy(self.facts.response_lens),
            step_start_logprobs=(self.reference if self.step_start is None else self.step_start)[
                rows
            ],
            reference_logprobs=self.reference[rows],
            sampler_logprobs=None if self.sampler is None else self.sampler[rows],
            # As if from a critic: any numbers that differ from token to token.
            estimates={
                name: (self.reference * factor).sin()[rows].to(source.dtype)
                for name, factor in (("value", 3.0), ("advantage", 5.0), ("return", 7.0))
            },
        )

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """[n], masked sums by sample."""
        out = torch.zeros(self.facts.num_samples, dtype=values.dtype)
        return out.index_add(0, self.sample_of_token, values * self.mask)


def make_facts(
    groups: Sequence[int],
    labels: Sequence[float],
    *,
    lens: Sequence[int] | None = None,
    truncated: Sequence[bool] | None = None,
    rewards: Sequence[float] | None = None,
    log_ratio_to_sampler: Sequence[float] | None = None,
) -> SampleFacts:
    n = len(groups)
    return SampleFacts(
        ids=tuple(f"0:data/{group}#{row}" for row, group in enumerate(groups)),
        groups=np.asarray(groups, dtype=np.int64),
        labels=np.asarray(labels, dtype=np.float64),
        rewards=np.asarray(labels if rewards is None else rewards, dtype=np.float64),
        prompt_lens=np.full(n, 5, dtype=np.int64),
        response_lens=np.asarray(lens if lens is not None else [1] * n, dtype=np.int64),
        truncated=np.asarray(truncated if truncated is not None else [False] * n, dtype=np.bool_),
        log_ratio_to_sampler=None
        if log_ratio_to_sampler is None
        else np.asarray(log_ratio_to_sampler, np.float64),
    )


def make_record(logprobs: torch.Tensor, lens: Sequence[int], **fields: Any) -> TokenRecord:
    """All tokens of all responses, none masked; `fields` are further fields of the record."""
    return TokenRecord(
        logprobs=logprobs,
        mask=torch.ones_like(logprobs),
        sample_of_token=torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)),
        response_lens=torch.tensor(lens),
        **fields,
    )


def random_batch(
    seed: int, sizes: Sequence[int] = (2, 3, 4, 5, 6, 7, 8, 4, 3), spread: float = 0.5
) -> Batch:
    """Groups of `sizes` at random positions in the batch; mixed and one-class groups; some tokens
    masked out.
    """
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    labels = rng.integers(0, 2, len(groups)).astype(float)
    labels[groups == len(sizes) - 1] = 1.0
    labels[groups == len(sizes) - 2] = 0.0
    raw_lens = rng.integers(2, 9, len(groups))
    sample_of_token = np.repeat(np.arange(len(groups)), raw_lens)
    mask = (rng.random(len(sample_of_token)) < 0.8).astype(float)
    mask[np.cumsum(raw_lens) - 1] = 1.0
    logprobs = -rng.exponential(1.0, len(mask))
    facts = make_facts(
        groups.tolist(),
        labels.tolist(),
        lens=np.bincount(sample_of_token, weights=mask).astype(int).tolist(),
        truncated=(rng.random(len(groups)) < 0.2).tolist(),
        rewards=(labels + rng.normal(0, 0.1, len(groups))).tolist(),
    )
    return Batch(
        facts=replace(facts, advantage_abs=rng.exponential(1.0, len(groups))),
        logprobs=torch.from_numpy(logprobs),
        reference=torch.from_numpy(logprobs + rng.normal(0, spread, len(mask))),
        mask=torch.from_numpy(mask),
        sample_of_token=torch.from_numpy(sample_of_token),
    )


def reference_proxy(batch: Batch, logprobs: torch.Tensor, proxy: str, beta: float) -> torch.Tensor:
    """r [n] (7), one sample after the other."""
    rows = []
    for sample in range(batch.facts.num_samples):
        keep = (batch.sample_of_token == sample) & (batch.mask == 1)
        if proxy == "sum_log_ratio":
            rows.append(beta * (logprobs[keep] - batch.reference[keep]).sum())
        else:
            rows.append(beta * logprobs[keep].mean())
    return torch.stack(rows)


def reference_scores(r: torch.Tensor, score: str, floor: float | None = None) -> torch.Tensor:
    """psi (6) of one group [G], as the paper writes it."""
    size = len(r)
    if score == "naive":
        return r
    if score == "rloo":
        return torch.stack(
            [r[i] - sum(r[j] for j in range(size) if j != i) / (size - 1) for i in range(size)]
        )
    centred = r - r.mean()
    if score == "dr_grpo":
        return centred
    # Autograd of the standard deviation is NaN at 0.
    std = torch.zeros((), dtype=r.dtype) if bool((r == r[0]).all()) else r.std(unbiased=True)
    if floor is not None and float(std.detach()) < floor:
        std = torch.tensor(floor, dtype=r.dtype)
    return centred / (std + EPS)


def reference_weights(labels: torch.Tensor, weighting: str) -> torch.Tensor:
    """w (3.5) of one group [G]."""
    ones = torch.ones_like(labels)
    if weighting == "only_positive":
        return labels
    if weighting == "only_negative":
        return ones - labels
    counts = {y: int((labels == y).sum()) for y in (0.0, 1.0)}
    if weighting == "none" or 0 in counts.values():
        return ones
    return torch.tensor([len(labels) / (2 * counts[float(y)]) for y in labels], dtype=labels.dtype)


def reference_loss(
    r: torch.Tensor, facts: SampleFacts, score: str, weighting: str, floor: float | None = None
) -> torch.Tensor:
    """L (8)."""
    labels = torch.from_numpy(facts.labels)
    total = torch.zeros((), dtype=r.dtype)
    for group in range(facts.num_groups):
        rows = torch.from_numpy(np.flatnonzero(facts.groups == group))
        psi = reference_scores(r[rows], score, floor)
        losses = F.binary_cross_entropy_with_logits(psi, labels[rows], reduction="none")
        total = total + (reference_weights(labels[rows], weighting) * losses).sum()
    return total / facts.num_samples


def objective_gradient(
    objective: Objective, batch: Batch, prepared: Prepared, cuts: int = 1, seed: int = 0
) -> tuple[torch.Tensor, float]:
    """d(sum of token_loss)/d logprobs [t], and the sum, as an engine computes it: micro-batches,
    masked sums, no division.

    Whole samples are assigned to `cuts` micro-batches in a random order, so siblings are separated.
    """
    logprobs = batch.logprobs.clone().requires_grad_(True)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(batch.facts.num_samples))
    total = 0.0
    for rows in torch.tensor_split(order, cuts):
        tokens = torch.nonzero(torch.isin(batch.sample_of_token, rows))[:, 0]
        record = batch.record(tokens, logprobs)
        loss = (objective.token_loss(record, prepared) * record.mask).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    assert logprobs.grad is not None
    return logprobs.grad, total


def objective_scores(objective: Objective, batch: Batch) -> torch.Tensor:
    """r [n] as an engine computes it."""
    with torch.no_grad():
        return batch.sums(objective.token_scores(batch.record()))
