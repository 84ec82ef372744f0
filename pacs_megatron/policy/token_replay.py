"""Replay of one router's experts for the tokens of samples; padding follows the router."""

from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor


class _ReplayList(list[Tensor]):
    """Megatron's list of the experts that recomputed forwards replay, in int16.

    A pass holds it for all of its micro-batches: int64 needs 3 KB a token for 48 layers and 8
    experts.
    """

    def append(self, experts: Tensor) -> None:
        super().append(experts.to(torch.int16))

    def pop(self, index: SupportsIndex = -1) -> Tensor:
        return super().pop(index).long()


class TokenReplay(RouterReplay):
    """Megatron's `RouterReplay` that never replays experts of padding.

    The tokens of an expert are the rows of one matrix product, whose number can change the rounding
    of every row. So padding needs the same experts in all passes: those that the router selects,
    as in a pass that replays nothing.
    """

    recorded_topk_idx: Tensor | None
    target_topk_idx: Tensor | None
    replay_backward_list: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.clear_indices()

    def clear_indices(self) -> None:
        """Forgets the experts of all passes."""
        super().clear_indices()
        self._is_padding: Tensor | None = None
        self.replay_backward_list = _ReplayList()

    def replay(self, experts: Tensor, is_padding: Tensor) -> None:
        """Sets the experts of the next forward.

        Args:
            experts: int64 [t, top k], of this rank's input tokens; any valid ones for padding.
            is_padding: bool [t].
        """
        self.target_topk_idx = experts
        self._is_padding = is_padding
        self.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def record(self) -> None:
        """Lets the router select the experts of the next forward, and records them."""
        self.set_router_replay_action(RouterReplayAction.RECORD)

    def end_forward(self, *, is_recomputed: bool) -> Tensor:
        """The experts that the last forward used, int16 [t, top k].

        Args:
            is_recomputed: whether the backward pass repeats the forward, which then uses the same
                experts. Recomputed forwards come in the order of the first ones.
        """
        assert self.recorded_topk_idx is not None
        experts: Tensor = self.recorded_topk_idx.to(torch.int16)
        if is_recomputed:
            self.replay_backward_list.append(experts)
        self.recorded_topk_idx = None
        self.target_topk_idx = None
        self._is_padding = None
        self.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return experts

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts of each token; the arguments are Megatron's."""
        arguments: dict[str, Any] = {"num_groups": num_groups, "group_topk": group_topk}
        if self.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            assert default_compute_topk is not None
            assert self.target_topk_idx is not None
            assert self._is_padding is not None
            _, selected = default_compute_topk(scores, topk, **arguments)
            experts = torch.where(self._is_padding[:, None], selected, self.target_topk_idx)
            self.target_topk_idx = experts
            self.record_indices(experts)
        chosen: tuple[Tensor, Tensor] = super().get_replay_topk(
            scores, topk, default_compute_topk=default_compute_topk, **arguments
        )
        return chosen
