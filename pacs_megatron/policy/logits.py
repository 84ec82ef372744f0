"""All logits of some sequences, for comparison with another implementation. Not used in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from pacs_megatron.models import ModelSpec


@torch.no_grad()
def logits(chunks: Sequence[torch.nn.Module], spec: ModelSpec, sequences: Sequence[Sequence[int]]) -> Tensor | None:
    """float32 [t, v] of all sequences one after the other, v without padding; None except on the last pipeline stage.

    One packed forward through Megatron's schedule. Collective over the model's ranks.
    """
    device = next(chunks[0].parameters()).device
    lens = [len(sequence) for sequence in sequences]
    bounds = torch.tensor([0, *lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    tokens = torch.tensor([t for sequence in sequences for t in sequence], device=device)[None]
    positions = torch.cat([torch.arange(n, device=device) for n in lens])[None]
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=max(lens), max_seqlen_kv=max(lens)
    )

    def keep(output: Tensor, *, non_loss_data: bool) -> Tensor:
        gathered = tensor_parallel.gather_from_tensor_model_parallel_region(output)
        result: Tensor = gathered[0, :, : spec.vocab_size].float()
        return result

    def step(iterator: Iterator[None], model: torch.nn.Module) -> Any:
        next(iterator)
        return model(tokens, positions, None, packed_seq_params=packed), keep

    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter([None]) for _ in chunks] if len(chunks) > 1 else iter([None]),
        model=list(chunks),
        num_microbatches=1,
        seq_length=1,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return results[0] if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else None
