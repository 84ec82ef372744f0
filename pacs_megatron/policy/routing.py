"""Expert routing of a pass over micro-batches: one pass over a mini-batch records it, the later
passes replay it.

All passes of a mini-batch use the same experts. Megatron's RouterReplay has one recording in each
router. Here the recording belongs to a sample, a layer and a token, so another packing, stage or
layout can replay it. Recomputed forwards replay the micro-batches in their first order.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from pacs_megatron.models import ModelSpec
from pacs_megatron.policy.microbatch import MicroBatch
from pacs_megatron.policy.model import PolicyModel

Routes = dict[int, np.ndarray]
"""row -> int16 [input tokens, layers, top k], the experts of each token; -1 if another rank has
them. May be flat.
"""


class Routing:
    """Routing of one pass: replays `given` in micro-batches whose samples all have routes, and
    records the others. Call `finish` after the pass.
    """

    def __init__(
        self, spec: ModelSpec, models: Sequence[PolicyModel], given: Routes | None
    ) -> None:
        assert spec.moe is not None
        self._shape = (spec.num_layers, spec.moe.top_k)
        self._models = models
        self._given = given
        self._recorded: list[tuple[MicroBatch, Tensor, dict[int, Tensor]]] = []

    @contextlib.contextmanager
    def around(self, model: PolicyModel, batch: MicroBatch) -> Iterator[None]:
        """Wraps the forward pass of a micro-batch through a chunk."""
        routers = dict(_routers(model))
        place = batch.place
        if model.config.sequence_parallel:
            tp = parallel_state.get_tensor_model_parallel_world_size()
            place = place.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()]
        given = self._given or {}
        experts = (
            self._at(batch, place, given)
            if given and all(int(row) in given for row in batch.rows)
            else None
        )
        for layer, router in routers.items():
            if experts is None:
                router.set_router_replay_action(RouterReplayAction.RECORD)
            else:
                router.set_target_indices(experts[:, layer])  # also for a recomputed forward
                router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        if experts is None:
            self._recorded.append(
                (batch, place, {k: r.recorded_topk_idx for k, r in routers.items()})
            )
        for router in routers.values():
            if experts is None:  # a recomputed forward replays this one
                router.replay_backward_list.append(router.recorded_topk_idx)
            router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def _at(self, batch: MicroBatch, place: Tensor, given: Routes) -> Tensor:
        """Experts, int64 [t, layers, top k]. Padding uses the first experts."""
        padding = np.broadcast_to(np.arange(self._shape[1]), (1, *self._shape))
        pieces = [given[int(row)].reshape(-1, *self._shape) for row in batch.rows]
        experts = torch.from_numpy(np.concatenate([*pieces, padding]).astype(np.int16)).to(
            place.device
        )
        return experts[place].long()  # index -1 selects the last entry, the padding

    def finish(self) -> None:
        """Ends recording and replay: the routers select experts again."""
        for model in self._models:
            for _, router in _routers(model):
                router.clear_indices()
                router.clear_router_replay_action()

    def recorded(self) -> Routes:
        """Routes that this rank recorded: its layers only; with sequence or context parallelism its
        tokens only.
        """
        found: Routes = {}
        for batch, place, by_layer in self._recorded:
            ends = np.cumsum(batch.input_lens)
            known = (place >= 0).cpu()
            experts = np.full((int(batch.input_lens.sum()), *self._shape), -1, np.int16)
            for layer, chosen in by_layer.items():
                experts[place.cpu()[known].numpy(), layer] = chosen.cpu()[known].numpy()
            pieces = np.split(experts, ends[:-1]) if len(ends) else []
            for row, piece in zip(batch.rows, pieces, strict=True):
                at = int(row)
                found[at] = (
                    np.maximum(found[at], piece) if at in found else piece
                )  # chunks have other layers
        return found


def _routers(model: PolicyModel) -> Iterator[tuple[int, RouterReplay]]:
    """(0-based layer of the whole model, its replay)"""
    for layer in model.decoder.layers:
        yield layer.layer_number - 1, layer.mlp.router.router_replay
