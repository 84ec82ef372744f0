"""Averages of token losses over a mini-batch, as one weight per sample: the engine only sums."""

from typing import Literal

import numpy as np

from pacs_megatron.objectives.groups import FloatArray, IntArray


def mean_weights(
    response_lens: IntArray, loss_mean: Literal["token", "sequence", "dr_grpo"], constant_length: int | None = None
) -> FloatArray:
    """float64 [n], weight of each token of a sample: 1/T over all T tokens, 1/(N |o_i|), or 1/(N constant_length)."""
    num_samples = len(response_lens)
    match loss_mean:
        case "token":
            return np.full(num_samples, 1.0 / max(int(response_lens.sum()), 1))
        case "sequence":
            return 1.0 / (num_samples * np.maximum(response_lens, 1).astype(np.float64))
        case "dr_grpo":
            if constant_length is None:
                raise ValueError("objective: loss_mean dr_grpo without constant_length")
            return np.full(num_samples, 1.0 / (num_samples * constant_length))
