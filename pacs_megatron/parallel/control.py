"""The CPU control channel, over which rank 0 sends decisions to all ranks.

It uses gloo, because NCCL's watchdog ends long waits.

Concurrency: while rank 0 waits for the driver it sends WAIT heartbeats, and the other ranks wait in
`receive`. A signal on any rank reaches rank 0 with the next `poll`, and becomes a decision for all
ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from pacs_megatron.errors import PacsError, named_error
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import broadcast_json

T = TypeVar("T")


class ControlChannel:
    """Decisions, plain values and errors between all ranks, over the control group."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._group = rank.control
        self.on_heartbeat: Callable[[], None] = lambda: None

    def send(self, decision: Mapping[str, Any]) -> None:
        """Rank 0 only, while all other ranks are in `receive`: plain JSON values, with `kind`."""
        self.broadcast_json(decision)

    def heartbeat(self) -> None:
        """Sends a heartbeat, as `send`: rank 0 is alive and waits."""
        self.on_heartbeat()
        self.send({"kind": "wait"})

    def receive(self) -> dict[str, Any]:
        """Every rank but 0: the next decision that is not a heartbeat.

        Calls `on_heartbeat` for each heartbeat.
        """
        while True:
            received: dict[str, Any] = self.broadcast_json(None)
            if received["kind"] != "wait":
                return received
            self.on_heartbeat()

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's `value`, plain JSON values, on every rank. Collective."""
        return broadcast_json(value, src=0, group=self._group)

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. Collective."""
        value = torch.tensor([int(flag)])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return bool(value)

    def run_together(self, action: Callable[[], T], *, only: int | None = None) -> T:
        """Runs `action` on every rank, or on rank `only`, and returns its result (None on ranks
        that do not run it). If ranks fail, raises the PacsError of the lowest failed rank on all
        ranks, so that no rank waits in a collective for a failed one, and all handle the same
        error. Collective.
        """
        result = None
        error = None
        if only is None or only == self.rank.rank:
            try:
                result = action()
            except PacsError as caught:
                error = caught
        failed = torch.zeros(self.rank.layout.world_size, dtype=torch.int64)
        failed[self.rank.rank] = int(error is not None)
        dist.all_reduce(failed, group=self._group)
        if failed.any():
            first = int(failed.argmax())
            name, message = broadcast_json(
                [type(error).__name__, str(error)], src=first, group=self._group
            )
            raise (
                error
                if error is not None and first == self.rank.rank
                else named_error(name, message)
            )
        return cast("T", result)
