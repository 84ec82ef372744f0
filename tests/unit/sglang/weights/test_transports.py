"""The trainer's end of a broadcast whose other end never receives."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from pacs_megatron.sglang.weights.transports import GROUP_SETTINGS, BroadcastTransport, _Group
from tests.support.ranks import free_port, run_ranks

TIMEOUT_S = 300.0


def test_giving_up_a_broken_group_does_not_wait_for_its_time_limit(tmp_path: Path) -> None:
    """More than a socket's buffer is on its way to a server that has stopped.

    The trainer must go on at once.
    """
    port = free_port()

    def on_rank(rank: int, world_size: int) -> float:
        store = TCPStore(
            "127.0.0.1",
            port,
            world_size,
            rank == 0,
            timedelta(seconds=TIMEOUT_S),
            wait_for_workers=False,
        )
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        backend = dist.ProcessGroupGloo(PrefixStore("sync", store), rank, world_size, options)
        backend.broadcast([torch.zeros(10)], dist.BroadcastOptions()).wait(
            timedelta(seconds=TIMEOUT_S)
        )
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


def test_the_end_of_a_transport_waits_for_its_groups() -> None:
    """A thread in a group's destructor at the end of the process is a SIGABRT."""
    began = threading.Event()
    ended = threading.Event()

    class Backend:
        def abort(self) -> None:
            """The destructor has the work."""

        def __del__(self) -> None:
            began.set()
            time.sleep(0.5)
            ended.set()

    transport = BroadcastTransport("127.0.0.1", 5.0)
    transport._groups["url"] = _Group("sync", "gloo", Backend(), None)
    transport.close()
    assert began.is_set() and ended.is_set()


def test_the_watchdog_of_an_nccl_group_may_not_end_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that dies inside a broadcast costs its group; torch's default ends the process of
    rank 0.
    """
    seen: list[dict[str, str | None]] = []

    class Group:
        class Options:
            _timeout = timedelta()

        def __init__(self, *_: object) -> None:
            seen.append({name: os.environ.get(name) for name in GROUP_SETTINGS})

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    BroadcastTransport("127.0.0.1", 5.0)._new_backend("nccl", "sync", 2, store)
    assert seen == [{"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}]
    assert (
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    )  # the trainer's own groups keep theirs
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
