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
    chunks: Sequence[torch.nn.Module],
    spec: ModelSpec,
    sequences: Sequence[Sequence[int]],
) -> Tensor | None:
    """All logits, from one packed forward pass. Collective over the model's ranks.

    Sequences are packed without padding, and no sequence attends to another one.

    Args:
        chunks: this rank's model chunks.
        spec: the model.
        sequences: token ids of each sequence.

    Returns:
        [t, v], fp32, of the t tokens of all sequences one after the other, v without padding; None
        except on the last pipeline stage.
    """
    device = next(chunks[0].parameters()).device
    token_ids: list[int] = []
    positions: list[int] = []
    bounds = [0]
    for sequence in sequences:
        token_ids += sequence
        positions += range(len(sequence))
        bounds.append(len(token_ids))

    # The schedule reads these attributes of a micro-batch.
    batch: Any = SimpleNamespace(
        input_ids=torch.tensor(token_ids, device=device)[None],
        position_ids=torch.tensor(positions, device=device)[None],
        labels=None,
        packed=packed_params(torch.tensor(bounds, dtype=torch.int32), device),
    )

    def gather_vocabulary(_batch: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        """[1, t, padded v / tp] -> (a loss that the schedule needs, [t, v])"""
        gathered = tensor_parallel.gather_from_tensor_model_parallel_region(output)
        return output.sum(), gathered[0, :, : spec.vocab_size].float()

    iterators = [iter([batch]) for _ in chunks]
    results = run_schedule(chunks, iterators, 1, gather_vocabulary)
    return results[0] if results else None
