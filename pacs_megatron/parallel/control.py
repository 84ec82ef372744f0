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
        """Sends a decision to all other ranks, which are in `receive`. Rank 0 only.

        Args:
            decision: plain JSON values; `kind` names the decision, and "wait" is a heartbeat.
        """
        self.broadcast_json(decision)

    def heartbeat(self) -> None:
        """Sends a heartbeat to all other ranks, which are in `receive`. Rank 0 only."""
        self.on_heartbeat()
        self.send({"kind": "wait"})

    def receive(self) -> dict[str, Any]:
        """The next decision of rank 0 that is not a heartbeat. Every rank but 0.

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
        """Runs `action` and returns its result. Collective.

        If ranks fail, all ranks raise the error of the lowest failed rank. So no rank waits in a
        collective for a failed one, and all ranks handle the same error.

        Args:
            action: what to run.
            only: the rank that runs it; the other ranks return None. None: every rank runs it.

        Raises:
            PacsError: of the lowest rank whose `action` raises one.
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
            if error is not None and first == self.rank.rank:
                raise error
            raise named_error(name, message)
        return cast("T", result)
