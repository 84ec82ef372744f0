"""Expert routing: one pass over a mini-batch records it, the later passes replay it.

All passes of a mini-batch use the same experts. Megatron's RouterReplay has one recording in each
router. Here the recording belongs to a sample, a layer and a token, so another packing, stage or
layout can replay it. Padding belongs to no sample: its experts are never replayed. Recomputed
forwards replay the micro-batches in their first order.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from pacs_megatron.models import ModelSpec
from pacs_megatron.policy.microbatch import MicroBatch
from pacs_megatron.policy.model import PolicyModel
from pacs_megatron.policy.token_replay import TokenReplay

Routes = dict[int, np.ndarray]
"""row -> int16 [input tokens, layers, top k], the experts of each input token of a sample.

-1 if another rank has them. The array may be flat.
"""


class Routing:
    """Expert routing of one pass.

    It replays micro-batches whose samples all have routes, and records the others. Call `finish`
    after the pass.
    """

    def __init__(
        self,
        spec: ModelSpec,
        models: Sequence[PolicyModel],
        routes: Routes | None,
    ) -> None:
        """Routing of a pass that has not started.

        Args:
            spec: the model, which has experts.
            models: this rank's chunks.
            routes: experts to replay, of any samples; None: record all micro-batches.
        """
        assert spec.moe is not None
        self._shape = (spec.num_layers, spec.moe.top_k)
        self._models = models
        self._routes: Routes = routes or {}
        self._recorded: list[tuple[MicroBatch, Tensor, dict[int, Tensor]]] = []
        """micro-batch, input index [t] of its tokens, experts int16 [t, top k] of each layer"""

    @contextlib.contextmanager
    def around(self, model: PolicyModel, batch: MicroBatch) -> Iterator[None]:
        """Wraps the forward pass of a micro-batch through a chunk.

        Afterwards the chunk's routers replay the same experts in a recomputed forward.

        Args:
            model: the chunk.
            batch: the micro-batch.
        """
        routers = dict(_routers(model))
        input_index = _input_index(model, batch)
        is_recomputed = torch.is_grad_enabled() and model.config.recompute_granularity is not None
        is_recording = not self._can_replay(batch)
        if not is_recording:
            experts = self._experts_to_replay(batch, input_index)
            for layer, router in routers.items():
                router.replay(experts[:, layer], input_index < 0)
        else:
            for router in routers.values():
                router.record()
        yield

        used = {}
        for layer, router in routers.items():
            used[layer] = router.end_forward(is_recomputed=is_recomputed)
        if is_recording:
            self._recorded.append((batch, input_index, used))

    def _can_replay(self, batch: MicroBatch) -> bool:
        """Whether all samples have routes. A padding micro-batch replays if any sample has."""
        if not self._routes:
            return False
        return all(int(row) in self._routes for row in batch.rows)

    def _experts_to_replay(self, batch: MicroBatch, input_index: Tensor) -> Tensor:
        """The experts of this rank's input tokens.

        Args:
            batch: a micro-batch whose samples all have routes.
            input_index: int64 [t], of this rank's input tokens; -1 for padding.

        Returns:
            int64 [t, layers, top k], on the device of `input_index`; those of padding are not used.
        """
        num_layers, top_k = self._shape
        pieces = [self._routes[int(row)].reshape(-1, num_layers, top_k) for row in batch.rows]
        padding = np.broadcast_to(np.arange(top_k), (1, num_layers, top_k))
        experts = np.concatenate([*pieces, padding]).astype(np.int16)
        # Index -1 selects the last entry, the padding.
        return torch.from_numpy(experts).to(input_index.device)[input_index].long()

    def finish(self) -> None:
        """Ends recording and replay: the routers select experts again."""
        for model in self._models:
            for _, router in _routers(model):
                router.clear_indices()
                router.clear_router_replay_action()

    def recorded(self) -> Routes:
        """The routes that this rank recorded.

        They have its layers only; with sequence or context parallelism its tokens only.
        """
        routes: Routes = {}
        for batch, input_index, experts_of_layer in self._recorded:
            index = input_index.cpu()
            is_token = index >= 0
            tokens = index[is_token].numpy()

            experts = np.full((int(batch.input_lens.sum()), *self._shape), -1, np.int16)
            for layer, selected in experts_of_layer.items():
                experts[tokens, layer] = selected.cpu()[is_token].numpy()

            ends = np.cumsum(batch.input_lens)
            pieces = np.split(experts, ends[:-1]) if len(ends) else []
            for row, piece in zip(batch.rows.tolist(), pieces, strict=True):
                if row in routes:
                    # Another chunk recorded other layers: the maximum keeps both, as -1 is absent.
                    piece = np.maximum(routes[row], piece)
                routes[row] = piece
        return routes


def _input_index(model: PolicyModel, batch: MicroBatch) -> Tensor:
    """int64 [t], `input_index` of the tokens that this rank's routers see."""
    if not model.config.sequence_parallel:
        return batch.input_index
    tp = parallel_state.get_tensor_model_parallel_world_size()
    tp_rank = int(parallel_state.get_tensor_model_parallel_rank())
    return batch.input_index.chunk(tp)[tp_rank]


def _routers(model: PolicyModel) -> Iterator[tuple[int, TokenReplay]]:
    """(0-based layer of the whole model, its replay)"""
    for layer in model.decoder.layers:
        yield layer.layer_number - 1, layer.mlp.router.router_replay
