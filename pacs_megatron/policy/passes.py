"""Forward and backward over a plan of micro-batches, through Megatron's own schedules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from pacs_megatron.policy.fp8_state import unchanged_fp8_state
from pacs_megatron.policy.microbatch import MicroBatch
from pacs_megatron.policy.stoppable import StoppablePass

LossFunction = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, log-probs [k] with graph, entropies [k]) -> (loss to back-propagate, sums to report)"""


def _model_step(after: Callable[..., Any], iterator: Iterator[MicroBatch], model: torch.nn.Module) -> Any:
    batch = next(iterator)
    output = model(batch.input_ids, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.packed)
    return output, partial(after, batch)


def _run(
    chunks: Sequence[torch.nn.Module],
    iterators: Sequence[Iterator[MicroBatch]],
    num_microbatches: int,
    after: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=partial(_model_step, after),
        data_iterator=list(iterators) if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=num_microbatches,
        # Unused: with variable_seq_lengths the stages exchange the true lengths.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results


def forward(
    chunks: Sequence[torch.nn.Module], batches: Sequence[MicroBatch], stoppable: StoppablePass | None = None
) -> list[Tensor]:
    """Log-probs float32 [local] of every micro-batch, on the last pipeline stage; an empty list elsewhere. No grad.

    Raises Interrupted on every rank after a stop request during `stoppable`, which has the same micro-batches.
    """

    def keep(batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = output[0]
        # Megatron reads the device of the loss when the model has experts; its value is not used.
        return logprobs.sum(), torch.zeros((), dtype=torch.int, device=logprobs.device), logprobs

    iterators = [iter(batches) for _ in chunks] if stoppable is None else stoppable.iterators(len(chunks))
    with torch.no_grad(), unchanged_fp8_state(chunks):
        results = _run(chunks, iterators, len(batches), keep, forward_only=True)
    if stoppable is not None:
        stoppable.finish()
    return results if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else []


def forward_backward(
    chunks: Sequence[torch.nn.Module], batches: Sequence[MicroBatch], loss_function: LossFunction
) -> list[Mapping[str, Tensor]]:
    """Gradients of the SUM of the losses over micro-batches and data-parallel ranks, into Megatron's buffers.

    Returns the report of `loss_function` for every micro-batch on the last pipeline stage, [] elsewhere.
    """

    def loss(batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        value, report = loss_function(batch, *output)
        # With a count of 0 tokens, finalize_model_grads does not divide the sum.
        return value, torch.zeros((), dtype=torch.int, device=value.device), report

    results = _run(chunks, [iter(batches) for _ in chunks], len(batches), loss, forward_only=False)
    return results if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else []
