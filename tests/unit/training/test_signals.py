"""Stop requests by signal."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import torch.distributed as dist

from pacs_megatron.training.signals import StopFlag
from tests.support.ranks import run_ranks


def test_a_signal_is_noticed_while_the_main_thread_waits_in_a_collective(tmp_path: Path) -> None:
    """The watchdog then names the phase that delays the end; Python's own handlers run too late for
    that.
    """

    def on_rank(rank: int, _world: int) -> str:
        noticed = ""
        if rank == 1:
            while not (tmp_path / "noticed").exists():
                time.sleep(0.05)
        else:
            stop = StopFlag(tmp_path)
            stop.install()

            def watch() -> None:
                nonlocal noticed
                os.kill(os.getpid(), signal.SIGUSR1)
                deadline = time.monotonic() + 60
                while not stop.reason and time.monotonic() < deadline:
                    time.sleep(0.05)
                noticed = stop.reason
                (tmp_path / "noticed").touch()

            threading.Timer(0.5, watch).start()
        dist.barrier()
        return noticed

    assert run_ranks(on_rank, 2) == ["SIGUSR1", ""]
