"""The trainer's end of a broadcast whose other end never receives."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from pacs_megatron.sglang.weights.transports import _Group
from tests.support.ranks import free_port, run_ranks

TIMEOUT_S = 8.0


def test_giving_up_a_broken_group_does_not_wait_for_its_time_limit() -> None:
    """More than a socket's buffer is on its way to a server that has stopped. The trainer must go on at once."""
    port = free_port()

    def on_rank(rank: int, world_size: int) -> float:
        store = TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=20), wait_for_workers=False)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        backend = dist.ProcessGroupGloo(PrefixStore("sync", store), rank, world_size, options)
        backend.broadcast([torch.zeros(10)], dist.BroadcastOptions()).wait(timedelta(seconds=5))
        if rank == 1:
            time.sleep(TIMEOUT_S / 2)  # holds the connection, receives nothing
            return 0.0
        work = backend.broadcast([torch.zeros(1 << 22)], dist.BroadcastOptions())
        group = _Group("sync", backend, store)
        del backend, store
        assert not work.is_completed()
        began = time.monotonic()
        group.end()
        del group, work
        return time.monotonic() - began

    assert run_ranks(on_rank, 2, init_process_group=False)[0] < 1.0
