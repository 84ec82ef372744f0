"""Forward and backward passes over a plan of micro-batches with Megatron's schedules, and expert routing in them.

One pass over a mini-batch records the routing, and the later passes replay it, so all passes use the same experts.
Megatron's RouterReplay has one recording in each router. Here the recording belongs to a sample, a layer and a token, so
another packing, stage or layout can replay it. Recomputed forwards replay the micro-batches in their first order.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from pacs_megatron.contracts import Interrupted
from pacs_megatron.models import ModelSpec
from pacs_megatron.policy.microbatch import MicroBatch, UpdateLoss, packed_params
from pacs_megatron.policy.model import PolicyModel, unwrap

Routes = dict[int, np.ndarray]
"""row -> int16 [input tokens, layers, top k], the experts of each token; -1 if another rank has them. May be flat."""


class Routing:
    """Routing of one pass: replays `given` in micro-batches whose samples all have routes, and records the others.
    Call `finish` after the pass."""

    def __init__(self, spec: ModelSpec, models: Sequence[PolicyModel], given: Routes | None) -> None:
        assert spec.moe is not None
        self._shape = (spec.num_layers, spec.moe.top_k)
        self._models = models
        self._given = given
        self._recorded: list[tuple[MicroBatch, Tensor, dict[int, Tensor]]] = []

    @contextlib.contextmanager
    def around(self, model: PolicyModel, batch: MicroBatch) -> Iterator[None]:
        """Wraps the forward pass of a micro-batch through a chunk."""
        routers, place = dict(_routers(model)), batch.place
        if model.config.sequence_parallel:
            tp = parallel_state.get_tensor_model_parallel_world_size()
            place = place.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()]
        given = self._given or {}
        experts = self._at(batch, place, given) if given and all(int(row) in given for row in batch.rows) else None
        for layer, router in routers.items():
            if experts is None:
                router.set_router_replay_action(RouterReplayAction.RECORD)
            else:
                router.set_target_indices(experts[:, layer])  # also for a recomputed forward
                router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        if experts is None:
            self._recorded.append((batch, place, {k: r.recorded_topk_idx for k, r in routers.items()}))
        for router in routers.values():
            if experts is None:  # a recomputed forward replays this one
                router.replay_backward_list.append(router.recorded_topk_idx)
            router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def _at(self, batch: MicroBatch, place: Tensor, given: Routes) -> Tensor:
        """Experts, int64 [t, layers, top k]. Padding uses the first experts."""
        padding = np.broadcast_to(np.arange(self._shape[1]), (1, *self._shape))
        pieces = [given[int(row)].reshape(-1, *self._shape) for row in batch.rows]
        experts = torch.from_numpy(np.concatenate([*pieces, padding]).astype(np.int16)).to(place.device)
        return experts[place].long()  # index -1 selects the last entry, the padding

    def finish(self) -> None:
        """Ends recording and replay: the routers select experts again."""
        for model in self._models:
            for _, router in _routers(model):
                router.clear_indices()
                router.clear_router_replay_action()

    def recorded(self) -> Routes:
        """Routes that this rank recorded: its layers only; with sequence or context parallelism its tokens only."""
        found: Routes = {}
        for batch, place, by_layer in self._recorded:
            ends, known = np.cumsum(batch.input_lens), (place >= 0).cpu()
            experts = np.full((int(batch.input_lens.sum()), *self._shape), -1, np.int16)
            for layer, chosen in by_layer.items():
                experts[place.cpu()[known].numpy(), layer] = chosen.cpu()[known].numpy()
            pieces = np.split(experts, ends[:-1]) if len(ends) else []
            for row, piece in zip(batch.rows, pieces, strict=True):
                at = int(row)
                found[at] = np.maximum(found[at], piece) if at in found else piece  # chunks have other layers
        return found


def _routers(model: PolicyModel) -> Iterator[tuple[int, RouterReplay]]:
    """(0-based layer of the whole model, its replay)"""
    for layer in model.decoder.layers:
        yield layer.layer_number - 1, layer.mlp.router.router_replay


StopTest = Callable[[], bool]


@dataclass(kw_only=True, eq=False)
class StoppablePass:
    """The micro-batches of one forward-only pass. A stop request on any rank replaces the rest by padding on every rank.

    Collective: every rank iterates, then calls `finish`. A rank must not leave Megatron's schedule early, because its
    peers wait for its output. So the schedule continues with padding micro-batches, which cost almost nothing.

    Concurrency: at micro-batch i every rank starts an asynchronous maximum of its flag over all ranks (gloo) and reads the
    result of micro-batch i - lag. The last pipeline stage is at most pp - 1 micro-batches behind, so no rank blocks.
    """

    batches: Sequence[MicroBatch]
    padding: MicroBatch
    should_stop: StopTest
    num_polls: int  # the smallest number of micro-batches of a rank
    lag: int  # at least pp
    group: dist.ProcessGroup
    _polls: list[tuple[Tensor, dist.Work]] = field(default_factory=list, init=False)
    _first_skipped: float = field(default=math.inf, init=False)

    def iterate(self, *, polls: bool) -> Iterator[MicroBatch]:
        """Yields the micro-batches of a chunk. The first chunk polls; the others run later and use its decision."""
        for index, batch in enumerate(self.batches):
            if polls and index < self.num_polls:
                flag = torch.tensor([int(self.should_stop())])
                work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
                self._polls.append((flag, work))
            polled = index - self.lag
            if polls and index < self._first_skipped and 0 <= polled < self.num_polls and self._is_stop(polled):
                self._first_skipped = index
            yield self.padding if index >= self._first_skipped else batch

    def _is_stop(self, index: int) -> bool:
        flag, work = self._polls[index]
        work.wait()
        return bool(flag)

    def finish(self) -> None:
        """Raises Interrupted on every rank if any rank had a stop request during the pass. Call after the schedule."""
        stops = [self._is_stop(index) for index in range(len(self._polls))]  # a list: every reduction must complete
        if any(stops):
            raise Interrupted


def _run(
    chunks: Sequence[torch.nn.Module],
    iterators: Sequence[Iterator[MicroBatch]],
    num_microbatches: int,
    after: Callable[[MicroBatch, Any], tuple[Tensor, Any]],
    *,
    loss: UpdateLoss | None = None,
    routing: Routing | None = None,
) -> list[Any]:
    """The results of `after` (which returns loss, result) by micro-batch on the last pipeline stage; [] elsewhere."""

    def step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> Any:
        batch, inner = next(iterator), unwrap(model)
        inner.want_entropy = loss is not None
        inner.loss_gradient = None if loss is None else loss.gradient(batch)
        with contextlib.nullcontext() if routing is None else routing.around(inner, batch):
            output = model(
                batch.input_ids, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.packed
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
    """Log-probs, float32 [local] without gradient, of every micro-batch on the last pipeline stage; [] elsewhere.
    Raises Interrupted on every rank after a stop request during `stoppable`, which has the same micro-batches."""
    iterators = [
        iter(batches) if stoppable is None else stoppable.iterate(polls=chunk == 0) for chunk in range(len(chunks))
    ]
    with torch.no_grad(), _unchanged_fp8_state(chunks):
        # Megatron reads the device of the loss when the model has experts; its value is not used.
        results = _run(chunks, iterators, len(batches), lambda _, out: (out[0].sum(), out[0]), routing=routing)
    if stoppable is not None:
        stoppable.finish()
    return results


def forward_backward(
    chunks: Sequence[torch.nn.Module], batches: Sequence[MicroBatch], loss: UpdateLoss, routing: Routing | None = None
) -> list[Mapping[str, Tensor]]:
    """Adds the gradients of the SUM of the losses over micro-batches and data-parallel ranks to Megatron's buffers.
    Returns the report of `loss` for every micro-batch on the last pipeline stage, [] elsewhere."""
    iterators = [iter(batches) for _ in chunks]
    return _run(chunks, iterators, len(batches), lambda batch, out: loss(batch, *out), loss=loss, routing=routing)


def _newest_amax(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    """float32 [tensors] per module with delayed scaling: the row of its amax history that casts write to."""
    for chunk in chunks:
        for module in chunk.modules():
            for key in ("scaling_fwd", "scaling_bwd"):
                history = getattr(getattr(module, "fp8_meta", {}).get(key), "amax_history", None)
                if history is not None:
                    yield history[0]


@contextlib.contextmanager
def _unchanged_fp8_state(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restores the state of FP8 after a pass without gradient: the amax histories of delayed scaling, and the queues of
    recomputation. Transformer Engine fills both, and the next update would compute its scales from them."""
    before = {amax.data_ptr(): amax.clone() for amax in _newest_amax(chunks)}
    try:
        yield
    finally:
        with torch.no_grad():
            for amax in _newest_amax(chunks):
                saved = before.get(amax.data_ptr())
                # The first pass creates the state; its newest row starts at 0.
                amax.zero_() if saved is None else amax.copy_(saved)
        if any(hasattr(module, "fp8_meta") for chunk in chunks for module in chunk.modules()):
            from transformer_engine.pytorch import distributed as te

            # No backward pass is pending, so all queued entries come from this pass.
            te.activation_recompute_forward._is_first_fp8_module.clear()
            for queue in te.FP8GlobalStateManager.fp8_tensors_recompute_buffer:
                queue.clear()


@torch.no_grad()
def logits(chunks: Sequence[torch.nn.Module], spec: ModelSpec, sequences: Sequence[Sequence[int]]) -> Tensor | None:
    """All logits from one packed forward, for comparison with another implementation. Collective over the model's ranks.

    float32 [t, v] of all sequences one after the other, v without padding; None except on the last pipeline stage.
    """
    device = next(chunks[0].parameters()).device
    lens = [len(sequence) for sequence in sequences]
    packed = packed_params(torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
    tokens = torch.tensor([t for sequence in sequences for t in sequence], device=device)[None]
    positions = torch.cat([torch.arange(n, device=device) for n in lens])[None]

    def keep(_batch: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        gathered = tensor_parallel.gather_from_tensor_model_parallel_region(output)
        return output.sum(), gathered[0, :, : spec.vocab_size].float()

    batch: Any = SimpleNamespace(input_ids=tokens, position_ids=positions, labels=None, packed=packed)
    results = _run(chunks, [iter([batch]) for _ in chunks], 1, keep)
    return results[0] if results else None
