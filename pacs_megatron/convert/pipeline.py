"""Runs independent jobs on a few threads with a limit on the bytes in flight: reading and writing
overlap.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from pacs_megatron.observability.progress import Progress
from pacs_megatron.runtime.waiting import report_wait

IN_FLIGHT_BYTES = 384 << 20
"""A job's peak memory is about three times its size (read, rearranged, split); this limit keeps the
total below 2 GiB.
"""

WORKERS = 4
"""Threads, independent of the number of cores: most of their time is disk I/O."""


@dataclass(frozen=True, slots=True)
class Job:
    """`nbytes` is the larger of the bytes read and the bytes written."""

    nbytes: int
    run: Callable[[], None]


def run_jobs(label: str, jobs: Iterable[Job], *, workers: int = WORKERS) -> None:
    """Runs all jobs in order. Jobs larger than the limit run one at a time beside the small ones.

    After the first error or an interrupt no job starts; the running jobs finish, then the error is
    raised.
    """
    todo = deque(jobs)
    running: dict[Future[None], int] = {}
    done_bytes = 0
    with (
        Progress(label, sum(job.nbytes for job in todo), unit="bytes") as progress,
        ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert") as pool,
    ):
        try:
            while todo or running:
                while (
                    todo
                    and len(running) < 2 * workers
                    and _fits(todo[0].nbytes, list(running.values()))
                ):
                    job = todo.popleft()
                    running[pool.submit(job.run)] = job.nbytes
                with report_wait(f"for files to be read and written ({label})"):
                    ended = wait(running, return_when=FIRST_COMPLETED)[0]
                for future in ended:
                    done_bytes += running.pop(future)
                    future.result()
                progress.advance(done_bytes)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _fits(nbytes: int, running: list[int]) -> bool:
    if nbytes > IN_FLIGHT_BYTES:
        return max(running, default=0) <= IN_FLIGHT_BYTES
    return nbytes + sum(size for size in running if size <= IN_FLIGHT_BYTES) <= IN_FLIGHT_BYTES
