"""Samples one token for each row of a batch, with its own stream of random numbers.

The model's distribution is softmax(logits / temperature). A token is drawn from it, restricted to
the tokens that pass both filters, each of which is applied to the whole distribution:

1. `top_k`: the `top_k` most likely tokens;
2. `top_p`: the smallest set of most likely tokens with at least `top_p` of the probability (nucleus
   sampling, Holtzman et al. 2020).

The returned log-prob is the model's, without the filters, as the trainer computes it. SGLang
applies its filters and returns its log-probs alike (sglang/srt/layers/sampler.py). With
`temperature = 0` (greedy) the log-prob is the model's at temperature 1.
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
        """Starts a stream of random numbers for each row.

        Args:
            params: temperature, top_k and top_p of all rows.
            seeds: one for each row; a row's tokens depend on its own seed only.
            device: of the logits.
        """
        # NumPy's compatibility policy fixes PCG64's raw stream, but not that of Generator.random.
        self._streams = [np.random.PCG64(seed) for seed in seeds]
        self._device = device
        self._params = params
        self._temperature = torch.tensor([[params.temperature]], dtype=torch.float32, device=device)

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of each row.

        Args:
            logits: [b, v], any floating-point dtype.

        Returns:
            ids: int64 [b].
            logprobs: float32 [b], nats, of the distribution without filters.
        """
        params = self._params
        logits = logits.float()
        if params.temperature == 0:
            ids = logits.argmax(dim=-1)
            logprobs = _column_of(logits, ids) - torch.logsumexp(logits, dim=-1)
            return ids, logprobs
        if params.temperature != 1:
            logits = logits / self._temperature

        uniform = self._uniform()
        if params.top_k > 0 or params.top_p < 1:
            return self._draw_filtered(logits, uniform)
        probs = torch.softmax(logits, dim=-1, dtype=torch.float64)
        ids = _inverse_cdf(probs, uniform)
        logprobs = _column_of(probs, ids).log().float()
        return ids, logprobs

    def keep(self, rows: torch.Tensor) -> None:
        """Drops all other rows.

        Args:
            rows: int64 [rows to keep], increasing.
        """
        self._streams = [self._streams[row] for row in rows.tolist()]

    def _uniform(self) -> torch.Tensor:
        """float64 [b, 1] in [0, 1): the next number of each row's stream."""
        raw = np.array([stream.random_raw() for stream in self._streams], dtype=np.uint64)
        # 52 bits, not 53: u times the total mass then stays below it after rounding.
        uniform = (raw >> np.uint64(12)) * 2.0**-52
        return torch.from_numpy(uniform).to(self._device)[:, None]

    def _draw_filtered(
        self, logits: torch.Tensor, uniform: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, log-probs) from the most likely tokens only; logits [b, v] fp32, uniform [b, 1]."""
        top_k = self._params.top_k
        top_p = self._params.top_p
        log_total = torch.logsumexp(logits.double(), dim=-1, keepdim=True)
        # A partial selection replaces the sort of the whole vocabulary.
        if 0 < top_k < logits.shape[-1]:
            values, order = torch.topk(logits, top_k, dim=-1)
        else:
            values, order = torch.sort(logits, dim=-1, descending=True, stable=True)

        all_logprobs = values.double() - log_total
        probs = all_logprobs.exp()
        if top_p < 1:
            # A token stays while the more likely ones have less than top_p together; so the first
            # always stays.
            before = probs.cumsum(dim=-1) - probs
            rank = torch.arange(values.shape[-1], device=values.device)
            is_dropped = before >= top_p
            is_dropped &= rank > 0
            probs = probs.masked_fill(is_dropped, 0.0)

        picked = _inverse_cdf(probs, uniform)
        return _column_of(order, picked), _column_of(all_logprobs, picked).float()


def _column_of(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[b]: from each row of values [b, v] the value in that row's column, int64 [b]."""
    return values.gather(-1, columns[:, None])[:, 0]


def _inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulated probability exceeds u times the total.

    It never has probability 0.

    Args:
        probs: float64 [b, v], not necessarily normalised.
        uniform: float64 [b, 1], u in [0, 1).

    Returns:
        int64 [b].
    """
    cdf = probs.cumsum(dim=-1)
    threshold = uniform * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, threshold, right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[-1] - 1)
