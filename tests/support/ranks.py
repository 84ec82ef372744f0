"""Several ranks in one test: import torch and Megatron once, then fork; gloo over loopback; a time
limit.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pacs_megatron.runtime import ports

if TYPE_CHECKING:
    from pacs_megatron.parallel.groups import Rank

T = TypeVar("T")

GRACE_S = 2.0
"""Time for the other ranks to fail after the first failure: their messages are often more specific.
"""


class RankError(AssertionError):
    """A rank raised, died or ran past the limit.

    The message contains the traceback of each failed rank.
    """


@dataclass(slots=True)
class _Child:
    rank: int
    pid: int
    pipe: int
    data: bytearray = field(default_factory=bytearray)
    status: int | None = None
    """wait status, None while the process runs"""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free; prefer port 0 if the server reports its port."""
    return ports.free_port("127.0.0.1")


def search_path(first: Path) -> str:
    """PYTHONPATH with a folder before what it already has.

    A GPU machine may have its packages there.
    """
    return os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_ranks(
    fn: Callable[[int, int], T],
    world_size: int,
    timeout: float = 600.0,
    *,
    init_process_group: bool = True,
) -> list[T]:
    """Runs `fn(rank, world_size)` in `world_size` forked processes and returns their results by
    rank.

    fn may be a closure (nothing is pickled on the way in); its result must be picklable. RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as torchrun sets them; with
    `init_process_group` the default group (gloo, a file store) exists during fn. One thread a rank.

    Raises RankError when a rank raised, died by a signal, or `timeout` seconds passed. No child
    outlives the call.
    """
    _import_heavy_modules()
    if threading.active_count() > 1:
        # A fork copies only this thread; a lock of another thread would never be released.
        names = sorted(
            thread.name for thread in threading.enumerate() if thread is not threading.main_thread()
        )
        _log(f"run_ranks: forking while other threads exist: {names}")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = f"file://{folder}/store" if init_process_group else None
        children: list[_Child] = []
        try:
            for rank in range(world_size):
                children.append(_fork(fn, rank, world_size, port, store, timeout))
            timed_out = _collect(children, time.monotonic() + timeout)
        finally:
            _reap(children)
    return _results(children, timeout if timed_out else None)


def rank_of(rank: int, *, tp: int = 1, dp: int = 1) -> Rank:
    """The Rank of a process of `run_ranks` without Megatron: one replica of `tp` ranks, or `dp`
    replicas of one rank.
    """
    import torch
    import torch.distributed as dist

    from pacs_megatron.contracts import Layout
    from pacs_megatron.parallel.groups import Rank

    assert dist.group.WORLD is not None and 1 in (tp, dp)
    return Rank(
        **dict.fromkeys(("pp", "ep"), 0),
        rank=rank,
        dp=rank if dp > 1 else 0,
        tp=rank if tp > 1 else 0,
        layout=Layout(world_size=tp * dp, tp=tp),
        device=torch.device("cpu"),
        control=dist.group.WORLD,
        model_parallel=dist.group.WORLD,
        model_parallel_ranks=tuple(range(tp)) if tp > 1 else (rank,),
        heads=tuple(range(dp)),
    )


def _import_heavy_modules() -> None:
    """In the parent, once: every forked rank then has them (torch and Megatron cost 6-8 s a
    process).
    """
    import megatron.core  # noqa: F401
    import torch

    torch.set_num_threads(1)  # an OpenMP pool does not survive a fork


def _fork(
    fn: Callable[[int, int], Any],
    rank: int,
    world_size: int,
    port: int,
    store: str | None,
    timeout: float,
) -> _Child:
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _child_main(fn, rank, world_size, port, store, timeout, write_end)
    os.close(write_end)
    os.set_blocking(read_end, False)
    return _Child(rank=rank, pid=pid, pipe=read_end)


def _child_main(
    fn: Callable[[int, int], Any],
    rank: int,
    world_size: int,
    port: int,
    store: str | None,
    timeout: float,
    pipe: int,
) -> NoReturn:
    """Never returns into pytest: every outcome ends in os._exit."""
    # The parent's objects are never collected here: the destructor of a gloo group of the parent
    # would wait for its threads, which a fork does not have.
    gc.freeze()
    signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's alarm belongs to the parent
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    code = 0
    try:
        payload: tuple[bool, Any] = (True, _call(fn, rank, world_size, store, timeout))
        data = pickle.dumps(payload)
    except BaseException:  # noqa: BLE001  every failure is reported to the parent, SystemExit too
        data = pickle.dumps((False, traceback.format_exc()))
        code = 1
    with os.fdopen(pipe, "wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _call(
    fn: Callable[[int, int], T], rank: int, world_size: int, store: str | None, timeout: float
) -> T:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if store is None:
        return fn(rank, world_size)
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    result = fn(rank, world_size)
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early resets the connections of the others
        dist.destroy_process_group()
    return result


def _collect(children: list[_Child], deadline: float) -> bool:
    """Reads results and wait statuses until all have ended; True if the deadline passed."""
    open_pipes = {child.pipe: child for child in children}
    while any(child.status is None for child in children):
        now = time.monotonic()
        if now >= deadline:
            return True
        readable, _, _ = select.select(list(open_pipes), [], [], min(0.05, deadline - now))
        for pipe in readable:
            chunk = os.read(pipe, 1 << 20)
            open_pipes[pipe].data += chunk
            if not chunk:
                del open_pipes[pipe]
        failed_before = any(child.status not in (None, 0) for child in children)
        for child in children:
            if child.status is None:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                child.status = status if pid else None
        if not failed_before and any(child.status not in (None, 0) for child in children):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    for pipe, child in open_pipes.items():
        while chunk := os.read(pipe, 1 << 20):
            child.data += chunk
    return False


def _reap(children: list[_Child]) -> None:
    for child in children:
        if child.status is None:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        os.close(child.pipe)


def _results(children: list[_Child], timeout: float | None) -> list[Any]:
    results: list[Any] = []
    failures: list[str] = []
    hung: list[int] = []
    for child in children:
        size = struct.unpack("<Q", child.data[:8])[0] if len(child.data) >= 8 else -1
        if size >= 0 and len(child.data) - 8 == size:
            ok, value = pickle.loads(child.data[8:])  # noqa: S301  our own child
            results.append(value)
            if not ok:
                failures.append(f"--- rank {child.rank}\n{value}")
        elif child.status is None:
            hung.append(child.rank)
        elif os.WIFSIGNALED(child.status):
            failures.append(
                f"--- rank {child.rank} died by signal "
                f"{signal.Signals(os.WTERMSIG(child.status)).name}"
            )
        else:
            failures.append(
                f"--- rank {child.rank} exited with {os.waitstatus_to_exitcode(child.status)}, no "
                "result"
            )
    if failures or hung:
        waiting = f"ranks {hung} had not finished" + (
            f" after {timeout:.0f} s" if not failures and timeout else ""
        )
        raise RankError("\n".join(([waiting] if hung else []) + failures))
    return results


def _log(message: str) -> None:
    print(message, file=sys.stderr)
