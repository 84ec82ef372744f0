"""The trainer's end of a broadcast whose other end never receives."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from pacs_megatron.sglang.weights.transports import _Group
from tests.support.ranks import free_port, run_ranks

TIMEOUT_S = 300.0


def test_giving_up_a_broken_group_does_not_wait_for_its_time_limit(tmp_path: Path) -> None:
    """More than a socket's buffer is on its way to a server that has stopped. The trainer must go on at once."""
    port = free_port()

    def on_rank(rank: int, world_size: int) -> float:
        store = TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        backend = dist.ProcessGroupGloo(PrefixStore("sync", store), rank, world_size, options)
        backend.broadcast([torch.zeros(10)], dist.BroadcastOptions()).wait(timedelta(seconds=TIMEOUT_S))
        if rank == 1:
            while not (tmp_path / "ended").exists():  # holds the connection, receives nothing
                time.sleep(0.05)
            return 0.0
        work = backend.broadcast([torch.zeros(1 << 22)], dist.BroadcastOptions())
        group = _Group("sync", "gloo", backend, store)
        del backend, store
        assert not work.is_completed()
        began = time.monotonic()
        group.end()
        del group, work
        took_s = time.monotonic() - began
        (tmp_path / "ended").touch()
        return took_s

    assert run_ranks(on_rank, 2, init_process_group=False)[0] < TIMEOUT_S / 2
