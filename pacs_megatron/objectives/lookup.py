"""Per-sample values of a mini-batch at its tokens."""

import torch

from pacs_megatron.contracts import TokenRecord


def at_tokens(per_sample: torch.Tensor, tokens: TokenRecord) -> torch.Tensor:
    """[t], each token's value of a [n] tensor, on the tokens' device."""
    return per_sample.to(tokens.sample_of_token.device)[tokens.sample_of_token]
