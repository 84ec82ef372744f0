"""The CPU control channel: rank 0 decides, every rank follows. Never a GPU collective, so NCCL's watchdog is not running.

Concurrency: rank 0 waits for the driver and meanwhile sends WAIT heartbeats; the other ranks wait in `receive`. A signal
on any rank reaches rank 0 with the next `poll`, and becomes a decision for all.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from pacs_megatron.contracts import Decision, DecisionKind
from pacs_megatron.parallel.groups import Rank


class ControlChannel:
    """Broadcasts decisions from rank 0 over the control group."""

    def __init__(self, rank: Rank) -> None:
        self._group = rank.control
        self.on_heartbeat: Callable[[], None] = lambda: None

    def send(self, decision: Decision) -> None:
        """Rank 0 only: everyone else is in `receive`."""
        payload = torch.frombuffer(bytearray(decision.to_bytes()), dtype=torch.uint8)
        dist.broadcast(torch.tensor([payload.numel()]), src=0, group=self._group)
        dist.broadcast(payload, src=0, group=self._group)

    def receive(self) -> Decision:
        """Every rank but 0: the next decision that is not a heartbeat; `on_heartbeat` is called for each of those."""
        while True:
            size = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(size, src=0, group=self._group)
            payload = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(payload, src=0, group=self._group)
            decision = Decision.from_bytes(payload.numpy().tobytes())
            if decision.kind is not DecisionKind.WAIT:
                return decision
            self.on_heartbeat()

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank says True. Collective."""
        value = torch.tensor([int(flag)])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return bool(value)

    def first_error(self, error: str | None) -> str | None:
        """The message of the lowest rank that has one, on every rank. Collective."""
        world = dist.get_world_size(self._group)
        has = torch.zeros(world, dtype=torch.int64)
        has[dist.get_rank(self._group)] = 0 if error is None else 1
        dist.all_reduce(has, group=self._group)
        failed = has.nonzero().flatten().tolist()
        if not failed:
            return None
        data = bytearray((error or "").encode())
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=failed[0], group=self._group)
        payload = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        if dist.get_rank(self._group) != failed[0]:
            payload = torch.empty(int(size), dtype=torch.uint8)
        if int(size):
            dist.broadcast(payload, src=failed[0], group=self._group)
        return payload.numpy().tobytes().decode()
