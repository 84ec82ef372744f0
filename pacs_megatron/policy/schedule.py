"""Forward and backward passes over a plan of micro-batches with Megatron's schedules."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from pacs_megatron.policy.fp8_state import unchanged_fp8_state
from pacs_megatron.policy.microbatch import MicroBatch, UpdateLoss
from pacs_megatron.policy.model import unwrap
from pacs_megatron.policy.routing import Routing
from pacs_megatron.policy.stoppable import StoppablePass


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    iterators: Sequence[Iterator[MicroBatch]],
    num_microbatches: int,
    after: Callable[[MicroBatch, Any], tuple[Tensor, Any]],
    *,
    loss: UpdateLoss | None = None,
    routing: Routing | None = None,
) -> list[Any]:
    """The results of `after` (which returns loss, result) by micro-batch on the last pipeline
    stage; [] elsewhere.
    """

    def step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> Any:
        batch = next(iterator)
        inner = unwrap(model)
        inner.want_entropy = loss is not None
        inner.loss_gradient = None if loss is None else loss.gradient(batch)
        with contextlib.nullcontext() if routing is None else routing.around(inner, batch):
            output = model(
                batch.input_ids,
                batch.position_ids,
                None,
                labels=batch.labels,
                packed_seq_params=batch.packed,
            )

        def finish(output: Any) -> tuple[Tensor, Tensor, Any]:
            value, result = after(batch, output)
            # With a count of 0 tokens, finalize_model_grads does not divide the sum of the losses.
            return value, torch.zeros((), dtype=torch.int, device=value.device), result

        return output, finish

    try:
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=list(iterators) if len(chunks) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=num_microbatches,
            # Unused: with variable_seq_lengths the stages exchange the true lengths.
            seq_length=1,
            micro_batch_size=1,
            forward_only=loss is None,
        )
    finally:
        if routing is not None:
            routing.finish()
    return results if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else []


def forward(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    stoppable: StoppablePass | None = None,
    routing: Routing | None = None,
) -> list[Tensor]:
    """Log-probs, float32 [local] without gradient, of every micro-batch on the last pipeline stage;
    [] elsewhere. Raises Interrupted on every rank after a stop request during `stoppable`, which
    has the same micro-batches.
    """
    iterators = [
        iter(batches) if stoppable is None else stoppable.iterate(polls=chunk == 0)
        for chunk in range(len(chunks))
    ]
    with torch.no_grad(), unchanged_fp8_state(chunks):
        # Megatron reads the device of the loss when the model has experts; its value is not used.
        results = run_schedule(
            chunks, iterators, len(batches), lambda _, out: (out[0].sum(), out[0]), routing=routing
        )
    if stoppable is not None:
        stoppable.finish()
    return results


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    loss: UpdateLoss,
    routing: Routing | None = None,
) -> list[Mapping[str, Tensor]]:
    """Adds the gradients of the SUM of the losses over micro-batches and data-parallel ranks to
    Megatron's buffers. Returns the report of `loss` for every micro-batch on the last pipeline
    stage, [] elsewhere.
    """
    iterators = [iter(batches) for _ in chunks]
    return run_schedule(
        chunks,
        iterators,
        len(batches),
        lambda batch, out: loss(batch, *out),
        loss=loss,
        routing=routing,
    )
