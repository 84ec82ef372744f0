"""Independent jobs on a few threads under a limit of bytes in flight: reading, transforming and writing overlap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from pacs_megatron.observability.progress import Progress

IN_FLIGHT_BYTES = 384 << 20
"""A job needs about three times its size for a moment (read, rearranged, cut); this keeps all of them below 2 GiB."""

_TELL_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """`nbytes` is what the job reads or writes, whichever is more."""

    nbytes: int
    run: Callable[[], None]


def run_jobs(label: str, jobs: Iterable[Job], *, workers: int, show_progress: bool) -> None:
    """Runs all jobs, starting them in order; a job larger than the limit runs alone.

    The first error, or an interrupt, stops new jobs, waits for those that run, and is raised.
    """
    todo = list(jobs)
    running: dict[Future[None], int] = {}
    with (
        Progress(label, sum(job.nbytes for job in todo), unit="bytes", enabled=show_progress) as progress,
        ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert") as pool,
    ):
        meter = _Meter(progress)
        try:
            for job in todo:
                while running and (len(running) >= 2 * workers or sum(running.values()) + job.nbytes > IN_FLIGHT_BYTES):
                    meter.collect(running)
                running[pool.submit(job.run)] = job.nbytes
            while running:
                meter.collect(running)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _Meter:
    """Tells the progress bar once a second: its speed is an average over calls, and a norm is no measure of speed."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done_bytes = 0
        self._told = time.monotonic()

    def collect(self, running: dict[Future[None], int]) -> None:
        """Waits for the next job that ends and counts it; raises its error."""
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            self._done_bytes += running.pop(future)
            future.result()
        if not running or time.monotonic() - self._told >= _TELL_EVERY_S:
            self._told = time.monotonic()
            self._progress.advance(self._done_bytes)
