"""All logits of a model, for comparison with another implementation."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from pacs_megatron.models import ModelSpec
from pacs_megatron.policy.microbatch import packed_params
from pacs_megatron.policy.schedule import run_schedule


@torch.no_grad()
def logits(
    chunks: Sequence[torch.nn.Module], spec: ModelSpec, sequences: Sequence[Sequence[int]]
) -> Tensor | None:
    """All logits from one packed forward, for comparison with another implementation.

    Collective over the model's ranks.

    float32 [t, v] of all sequences one after the other, v without padding; None except on the last
    pipeline stage.
    """
    device = next(chunks[0].parameters()).device
    lens = [len(sequence) for sequence in sequences]
    packed = packed_params(
        torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32), device
    )
    tokens = torch.tensor([t for sequence in sequences for t in sequence], device=device)[None]
    positions = torch.cat([torch.arange(n, device=device) for n in lens])[None]

    def keep(_batch: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        gathered = tensor_parallel.gather_from_tensor_model_parallel_region(output)
        return output.sum(), gathered[0, :, : spec.vocab_size].float()

    batch: Any = SimpleNamespace(
        input_ids=tokens, position_ids=positions, labels=None, packed=packed
    )
    results = run_schedule(chunks, [iter([batch]) for _ in chunks], 1, keep)
    return results[0] if results else None
