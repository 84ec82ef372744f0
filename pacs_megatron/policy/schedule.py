"""Forward and backward passes over a plan of micro-batches with Megatron's schedules."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from pacs_megatron.policy.fp8_state import unchanged_fp8_state
from pacs_megatron.policy.microbatch import MicroBatch, UpdateLoss
from pacs_megatron.policy.model import unwrap
from pacs_megatron.policy.routing import Routing
from pacs_megatron.policy.stoppable import StoppablePass

T = TypeVar("T")
Output = Literal["entropy", "certainty"]
"""values of a token that the head computes beside log-probs in a forward-only pass"""


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    iterators: Sequence[Iterator[MicroBatch]],
    num_microbatches: int,
    after: Callable[[MicroBatch, Any], tuple[Tensor, Any]],
    *,
    loss: UpdateLoss | None = None,
    routing: Routing | None = None,
) -> list[Any]:
    """Runs Megatron's schedule once. Collective.

    Args:
        chunks: this rank's model chunks.
        iterators: the micro-batches of each chunk, in the same order.
        num_microbatches: number of micro-batches of each iterator.
        after: (micro-batch, output of the last chunk) -> (loss [], result), after its forward pass.
        loss: of an update, for the head; None: the pass is forward only.
        routing: of a model with experts; None: the routers select experts.

    Returns:
        The result of `after` for each micro-batch on the last pipeline stage; [] elsewhere.
    """

    def step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> Any:
        """Megatron's forward step: (output, function of the output of the last chunk)."""
        batch = next(iterator)
        inner = unwrap(model)
        if inner.on_microbatch is not None:
            inner.on_microbatch()
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
            """(loss, number of tokens, result)"""
            value, result = after(batch, output)
            # With a count of 0 tokens, finalize_model_grads does not divide the sum of the losses.
            num_tokens = torch.zeros((), dtype=torch.int, device=value.device)
            return value, num_tokens, result

        return output, finish

    run = get_forward_backward_func()
    try:
        results: list[Any] = run(
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

    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return results if is_last else []


def forward(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    read: Callable[..., T],
    stoppable: StoppablePass | None = None,
    routing: Routing | None = None,
    *,
    want: Collection[Output] = (),
) -> list[T]:
    """Log-probs and entropies of every micro-batch, without gradient. Collective.

    Args:
        chunks: this rank's model chunks.
        batches: this rank's micro-batches.
        read: called on the last pipeline stage with each micro-batch, its log-probs ([local], fp32,
            nats) and its entropies (the same; [0] unless wanted); with `certainty` also with its
            certainties and logits (the same).
        stoppable: the same micro-batches, as a pass that a stop request ends; None: stop requests
            do not end the pass.
        routing: of a model with experts; None: the routers select experts.
        want: what the head computes beside log-probs.

    Returns:
        The result of `read` for each micro-batch on the last pipeline stage; [] elsewhere.

    Raises:
        Interrupted: on every rank, after a stop request on any rank during `stoppable`.
    """
    iterators = []
    for chunk in range(len(chunks)):
        if stoppable is None:
            iterators.append(iter(batches))
        else:
            iterators.append(stoppable.iterate(polls=chunk == 0))

    def read_output(batch: MicroBatch, output: Any) -> tuple[Tensor, T]:
        # Megatron reads the device of the loss when the model has experts; its value is not used.
        return output[0].sum(), read(batch, *output)

    _set_outputs(chunks, want)
    with torch.no_grad(), unchanged_fp8_state(chunks):
        results = run_schedule(chunks, iterators, len(batches), read_output, routing=routing)
    if stoppable is not None:
        stoppable.finish()
    return results


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    loss: UpdateLoss,
    routing: Routing | None = None,
) -> list[Mapping[str, Tensor]]:
    """Adds the gradients of the SUM of the losses to Megatron's buffers. Collective.

    The sum is over the micro-batches of all data-parallel ranks.

    Args:
        chunks: this rank's model chunks.
        batches: this rank's micro-batches.
        loss: of one micro-batch.
        routing: of a model with experts; None: the routers select experts.

    Returns:
        The report of `loss` for each micro-batch on the last pipeline stage; [] elsewhere.
    """
    iterators = [iter(batches) for _ in chunks]

    def loss_of_output(batch: MicroBatch, output: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        logprobs, entropies = output
        return loss(batch, logprobs, entropies)

    _set_outputs(chunks, ["entropy"])
    return run_schedule(
        chunks,
        iterators,
        len(batches),
        loss_of_output,
        loss=loss,
        routing=routing,
    )


def _set_outputs(chunks: Sequence[torch.nn.Module], want: Collection[Output]) -> None:
    """Sets what the head of the last chunk computes beside log-probs."""
    for chunk in chunks:
        unwrap(chunk).want_entropy = "entropy" in want
        unwrap(chunk).want_certainty = "certainty" in want
