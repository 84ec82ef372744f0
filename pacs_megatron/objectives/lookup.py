"""Per-sample values of a mini-batch at its tokens."""

import numpy as np
import torch

from pacs_megatron.contracts import TokenRecord


def at_tokens(per_sample: torch.Tensor, tokens: TokenRecord) -> torch.Tensor:
    """[t], each token's value of a [n] tensor, on the tokens' device."""
    return per_sample.to(tokens.sample_of_token.device)[tokens.sample_of_token]


def to_tensor(values: np.ndarray, order: np.ndarray) -> torch.Tensor:
    """[n] tensor in the order of the facts, from an array that was computed in `order`."""
    restored = np.empty_like(values)
    restored[order] = values
    return torch.from_numpy(restored)
