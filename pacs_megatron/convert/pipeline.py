"""Runs independent tasks on a few threads with a limit on the bytes in flight.

Reading and writing overlap.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from pacs_megatron.observability.progress import Progress
from pacs_megatron.runtime.waiting import report_wait

IN_FLIGHT_BYTES = 384 << 20
"""Limit of the sizes of running tasks, which keeps their memory below 2 GiB.

A task's peak memory is about three times its size (read, rearranged, split).
"""
WORKERS = 4
"""Threads, independent of the number of cores: most of their time is disk I/O."""


@dataclass(frozen=True, slots=True)
class Task:
    """The conversion or comparison of the tensors of one row of the weight table."""

    nbytes: int
    """the larger of the bytes read and the bytes written"""
    run: Callable[[], None]


def run_tasks(label: str, tasks: Iterable[Task], *, workers: int = WORKERS) -> None:
    """Starts all tasks in order. Tasks above the limit run one at a time beside the small ones.

    After the first error or an interrupt no task starts; the running tasks finish, then the error
    is raised.

    Args:
        label: of the progress bar.
        tasks: those of one conversion.
        workers: number of threads.
    """
    todo = deque(tasks)
    running: dict[Future[None], int] = {}
    done_bytes = 0
    with (
        Progress(label, sum(task.nbytes for task in todo), unit="bytes") as progress,
        ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert") as pool,
    ):
        try:
            while todo or running:
                while todo and len(running) < 2 * workers:
                    if not _fits(todo[0].nbytes, list(running.values())):
                        break
                    task = todo.popleft()
                    running[pool.submit(task.run)] = task.nbytes

                with report_wait(f"for files to be read and written ({label})"):
                    ended = wait(running, return_when=FIRST_COMPLETED)[0]
                for future in ended:
                    done_bytes += running.pop(future)
                    future.result()
                progress.advance(done_bytes)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _fits(nbytes: int, running: list[int]) -> bool:
    """Whether a task of this size may start beside running tasks of these sizes."""
    if nbytes > IN_FLIGHT_BYTES:
        return max(running, default=0) <= IN_FLIGHT_BYTES
    small_tasks = [size for size in running if size <= IN_FLIGHT_BYTES]
    return nbytes + sum(small_tasks) <= IN_FLIGHT_BYTES
