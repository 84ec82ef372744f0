"""Samples one token for each row of a batch, with its own parameters and its own stream of random numbers.

The distribution that is sampled from: softmax(logits / temperature), then only the `top_k` most likely tokens, then
the smallest set of most likely tokens with at least `top_p` of the remaining probability, renormalised (the order of Hugging Face
`generate`). The log-prob that is returned is of this distribution, so with filters on it is not the model's. With
`temperature = 0` (greedy) there is no distribution: the log-prob is the model's own, at temperature 1.
"""

from collections.abc import Sequence

import numpy as np
import torch

from pacs_megatron.contracts import SamplingParams

_BLOCK = 128
"""random numbers drawn at once for a row; its stream does not depend on it"""


class RowSampler:
    """Samples row by row. `keep` drops rows without an effect on the others."""

    def __init__(self, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> None:
        # NumPy's compatibility policy fixes PCG64's raw stream, but not that of Generator.random.
        self._streams = [np.random.PCG64(seed) for seed in seeds]
        self._device = device
        self._uniforms = torch.empty((len(params), 0), dtype=torch.float64, device=device)
        self._first = 0  # token index of the first column of _uniforms
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        self._greedy = (temperature == 0).to(device)
        self._temperature = torch.where(temperature == 0, 1.0, temperature)[:, None].to(device)
        self._top_k = torch.tensor([p.top_k for p in params], device=device)[:, None]
        self._top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
        # For the whole batch, so that a row's arithmetic does not change when other rows are dropped.
        self._all_greedy = bool(self._greedy.all())
        self._any_greedy = bool(self._greedy.any())
        self._scaled = bool((self._temperature != 1).any())
        self._filtered = any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params)
        # All rows cut at top_k: a partial selection replaces the sort of the whole vocabulary.
        self._max_k = max(p.top_k for p in params) if all(p.top_k > 0 for p in params) else 0

    def draw(self, logits: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token `index` (0-based) of each response: ids int64 [b], log-probs float32 [b] in nats. logits [b, v]."""
        logits = logits.float()
        if self._all_greedy:
            ids = logits.argmax(dim=-1)
            return ids, _log_prob(logits, ids)
        if self._scaled:
            logits = logits / self._temperature
        uniform = self._uniform(index)
        if self._filtered:
            ids, logprobs = self._draw_filtered(logits, uniform)
        else:
            probs = torch.softmax(logits, dim=-1, dtype=torch.float64)
            ids = _inverse_cdf(probs, uniform)
            logprobs = probs.gather(-1, ids[:, None])[:, 0].log().float()
        if self._any_greedy:
            best = logits.argmax(dim=-1)
            ids = torch.where(self._greedy, best, ids)
            logprobs = torch.where(self._greedy, _log_prob(logits, best), logprobs)
        return ids, logprobs

    def keep(self, rows: torch.Tensor) -> None:
        """Drops all rows but `rows` (int64, increasing)."""
        self._streams = [self._streams[i] for i in rows.tolist()]
        self._uniforms = self._uniforms[rows]
        self._greedy = self._greedy[rows]
        self._temperature = self._temperature[rows]
        self._top_k = self._top_k[rows]
        self._top_p = self._top_p[rows]

    def _uniform(self, index: int) -> torch.Tensor:
        """float64 [b, 1] in [0, 1): number `index` of each row's stream; indices must come in order."""
        if index >= self._first + self._uniforms.shape[1]:
            self._first += self._uniforms.shape[1]
            raw = np.stack([stream.random_raw(_BLOCK) for stream in self._streams])
            # 52 bits, not 53: u times the total mass then stays below it after rounding.
            self._uniforms = torch.from_numpy((raw >> np.uint64(12)) * 2.0**-52).to(self._device)
        column = index - self._first
        return self._uniforms[:, column : column + 1]

    def _draw_filtered(self, logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        vocab = logits.shape[-1]
        if 0 < self._max_k < vocab:
            values, order = torch.topk(logits, self._max_k, dim=-1)
        else:
            values, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        rank = torch.arange(values.shape[-1], device=values.device)
        cut = (self._top_k > 0) & (rank >= self._top_k)
        probs = torch.softmax(values.double().masked_fill(cut, -torch.inf), dim=-1)
        before = probs.cumsum(dim=-1) - probs
        # A token stays while the more likely ones have less than top_p together; so the first always stays.
        probs = probs.masked_fill((before >= self._top_p) & (rank > 0) & (self._top_p < 1), 0.0)
        picked = _inverse_cdf(probs, uniform)
        mass = probs.sum(dim=-1)
        logprobs = (probs.gather(-1, picked[:, None])[:, 0] / mass).log().float()
        return order.gather(-1, picked[:, None])[:, 0], logprobs


def _inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """int64 [b]: the first token whose cumulated probability exceeds u times the total; never one of probability 0."""
    cdf = probs.cumsum(dim=-1)
    return torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)


def _log_prob(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """float32 [b]: log softmax(logits)[ids], without writing the whole log-softmax."""
    return logits.gather(-1, ids[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
