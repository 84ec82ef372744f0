"""Starts child processes of a command on this host, optionally as ranks of a world.

They end with the command.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from pacs_megatron.errors import PacsError
from pacs_megatron.runtime.environment import RankPlace
from pacs_megatron.runtime.processes import die_with_parent
from pacs_megatron.runtime.waiting import report_wait

_POLL_S = 1.0


class Processes:
    """Processes that run `action`, each with a log in `work`; with `world`, as ranks whose
    rendezvous is a file.
    """

    def __init__(
        self,
        work: Path,
        name: str,
        action: Callable[[], None],
        world: int = 0,
        *,
        limit_s: float,
        start_method: Literal["fork", "spawn"] = "fork",
    ) -> None:
        from torch.multiprocessing.spawn import start_processes

        self._work = work
        self._name = name
        self._start = time.monotonic()
        self._limit_s = limit_s
        (work / f"{name}.rendezvous").unlink(missing_ok=True)
        arguments = (work, name, action, world, limit_s)
        self._context: Any = start_processes(  # type: ignore[no-untyped-call]
            _child, arguments, nprocs=world or 1, join=False, daemon=True, start_method=start_method
        )

    def wait(self, error: type[PacsError]) -> None:
        """Waits until all processes have ended.

        Raises `error` if one fails or the time limit has passed.
        """
        from torch.multiprocessing.spawn import ProcessException

        try:
            with report_wait(f"for {self._name}"):
                while not self._context.join(timeout=_POLL_S, grace_period=2.0):
                    if time.monotonic() - self._start > self._limit_s:
                        raise error(f"{self._name}: no end after {self._limit_s:.0f} s")
        except ProcessException as failure:
            errors = [file.read_text() for file in sorted(self._work.glob("*.error"))]
            # An error of the program is more specific than the connections that it broke.
            found = min(
                errors, key=lambda text: "onnection" in text, default=f"{self._name}: {failure}"
            )
            raise error(found) from None
        finally:
            self.end()

    def end(self) -> None:
        for process in self._context.processes:
            process.kill()
            process.join()


def _child(
    rank: int, work: Path, name: str, action: Callable[[], None], world: int, limit_s: float
) -> None:
    die_with_parent()
    log = os.open(work / f"{name} {rank}.log", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        if world:
            import torch
            import torch.distributed as dist

            os.environ.update(
                RankPlace(rank, world, rank, world, "127.0.0.1", 1).variables()
            )  # the port is not used
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            meet = (work / f"{name}.rendezvous").absolute()
            limit = timedelta(seconds=limit_s)
            dist.init_process_group(
                backend, init_method=f"file://{meet}", rank=rank, world_size=world, timeout=limit
            )
        action()
    except BaseException as error:
        (work / f"{name} {rank}.error").write_text(
            f"{name}, rank {rank}: {type(error).__name__}: {error}"
        )
        raise
