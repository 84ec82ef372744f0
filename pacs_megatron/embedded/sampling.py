"""Samples one token for each row of a batch, with its own stream of random numbers.

The sampling distribution is softmax(logits / temperature), then only the `top_k` most likely
tokens, then the smallest set of most likely tokens with at least `top_p` of the remaining
probability, renormalised (the order of Hugging Face `generate`). The returned log-prob is of this
distribution, so with filters it is not the model's. With `temperature = 0` (greedy) the log-prob is
the model's, at temperature 1.
"""

from collections.abc import Sequence

import numpy as np
import torch

from pacs_megatron.contracts import SamplingOptions


class RowSampler:
    """Samples row by row, all with the same parameters.

    `keep` drops rows without an effect on the others.
    """

    def __init__(self, params: SamplingOptions, seeds: Sequence[int], device: torch.device) -> None:
        # NumPy's compatibility policy fixes PCG64's raw stream, but not that of Generator.random.
        self._streams = [np.random.PCG64(seed) for seed in seeds]
        self._device = device
        self._params = params
        self._temperature = torch.tensor([[params.temperature]], dtype=torch.float32, device=device)

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of each response: ids int64 [b], log-probs float32 [b] in nats. logits [b,
        v].
        """
        logits = logits.float()
        if self._params.temperature == 0:
            ids = logits.argmax(dim=-1)
            return ids, logits.gather(-1, ids[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
        if self._params.temperature != 1:
            logits = logits / self._temperature
        uniform = self._uniform()
        if self._params.top_k > 0 or self._params.top_p < 1:
            return self._draw_filtered(logits, uniform)
        probs = torch.softmax(logits, dim=-1, dtype=torch.float64)
        ids = _inverse_cdf(probs, uniform)
        return ids, probs.gather(-1, ids[:, None])[:, 0].log().float()

    def keep(self, rows: torch.Tensor) -> None:
        """Drops all rows but `rows` (int64, increasing)."""
        self._streams = [self._streams[i] for i in rows.tolist()]

    def _uniform(self) -> torch.Tensor:
        """float64 [b, 1] in [0, 1): the next number of each row's stream."""
        raw = np.array([stream.random_raw() for stream in self._streams], dtype=np.uint64)
        # 52 bits, not 53: u times the total mass then stays below it after rounding.
        return torch.from_numpy((raw >> np.uint64(12)) * 2.0**-52).to(self._device)[:, None]

    def _draw_filtered(
        self, logits: torch.Tensor, uniform: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        top_k = self._params.top_k
        top_p = self._params.top_p
        if (
            0 < top_k < logits.shape[-1]
        ):  # a partial selection replaces the sort of the whole vocabulary
            values, order = torch.topk(logits, top_k, dim=-1)
        else:
            values, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        probs = torch.softmax(values.double(), dim=-1)
        if top_p < 1:
            before = probs.cumsum(dim=-1) - probs
            # A token stays while the more likely ones have less than top_p together; so the first
            # always stays.
            rank = torch.arange(values.shape[-1], device=values.device)
            probs = probs.masked_fill((before >= top_p) & (rank > 0), 0.0)
        picked = _inverse_cdf(probs, uniform)
        mass = probs.sum(dim=-1)
        logprobs = (probs.gather(-1, picked[:, None])[:, 0] / mass).log().float()
        return order.gather(-1, picked[:, None])[:, 0], logprobs


def _inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """int64 [b]: the first token whose cumulated probability exceeds u times the total; never one
    of probability 0.
    """
    cdf = probs.cumsum(dim=-1)
    return torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)[:, 0].clamp_(
        max=probs.shape[-1] - 1
    )
