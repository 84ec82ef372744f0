"""Starts child processes of a command on this host, optionally as ranks of one process group.

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
    """Processes that run the same function, each with a log `<name> <rank>.log`.

    Args:
        work: Folder of the logs, the errors and the rendezvous.
        name: Name for messages and file names.
        action: Runs in each process; `start_method="spawn"` pickles it.
        world_size: Number of ranks, whose rendezvous is a file; 0 starts one process without a
            process group.
        limit_s: Seconds after which `wait` raises, and timeout of the process group.
        start_method: `fork`, or `spawn` for a new interpreter.
    """

    def __init__(
        self,
        work: Path,
        name: str,
        action: Callable[[], None],
        world_size: int = 0,
        *,
        limit_s: float,
        start_method: Literal["fork", "spawn"] = "fork",
    ) -> None:
        from torch.multiprocessing.spawn import start_processes

        self._work = work
        self._name = name
        self._start = time.monotonic()
        self._limit_s = limit_s

        # torch would read the rendezvous of an earlier start.
        _rendezvous(work, name).unlink(missing_ok=True)
        self._context: Any = start_processes(  # type: ignore[no-untyped-call]
            _child,
            (work, name, action, world_size, limit_s),
            nprocs=world_size or 1,
            join=False,
            daemon=True,
            start_method=start_method,
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
            raise error(self._cause(failure)) from None
        finally:
            self.end()

    def end(self) -> None:
        """Kills the processes that still run."""
        for process in self._context.processes:
            process.kill()
            process.join()

    def _cause(self, failure: Exception) -> str:
        """The message of the process that failed first, as far as the messages show."""
        messages = [file.read_text() for file in sorted(self._work.glob("*.error"))]
        # An error of the program is more specific than the connections that it broke.
        for message in messages:
            if "onnection" not in message:
                return message
        return messages[0] if messages else f"{self._name}: {failure}"


def _rendezvous(work: Path, name: str) -> Path:
    return work / f"{name}.rendezvous"


def _child(
    rank: int, work: Path, name: str, action: Callable[[], None], world_size: int, limit_s: float
) -> None:
    die_with_parent()
    log = os.open(work / f"{name} {rank}.log", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)

    try:
        if world_size:
            _join_group(rank, world_size, _rendezvous(work, name), limit_s)
        action()
    except BaseException as error:
        message = f"{name}, rank {rank}: {type(error).__name__}: {error}"
        (work / f"{name} {rank}.error").write_text(message)
        raise


def _join_group(rank: int, world_size: int, rendezvous: Path, limit_s: float) -> None:
    """Sets the environment of a rank and joins the process group."""
    import torch
    import torch.distributed as dist

    place = RankPlace(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        master_addr="127.0.0.1",
        master_port=1,  # not used: the rendezvous is a file
    )
    os.environ.update(place.variables())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{rendezvous.absolute()}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=limit_s),
    )
