"""Writes checkpoints, with `checkpoint.async_save` in a thread while the next step runs.

Concurrency: every rank has such a thread. The main thread copies the tensors that a later update
changes. The thread writes them, the digests and the manifest, and renames the folder. Its
collectives use a separate process group. The main thread waits for it at the end of the next step
and before the run ends, so all ranks raise its error at the same point.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pacs_megatron.config.schema import RunConfig
from pacs_megatron.errors import PacsError
from pacs_megatron.parallel.groups import Rank, with_own_control
from pacs_megatron.runtime.waiting import report_wait

logger = logging.getLogger(__name__)


class Saver:
    """Runs the functions that `start_checkpoint` returns. Call `finish` before the next `write`."""

    def __init__(self, config: RunConfig, rank: Rank) -> None:
        """Collective."""
        in_background = config.checkpoint.async_save
        if in_background is None:
            in_background = rank.device.type == "cuda"
        self.in_background = in_background

        self._rank = rank
        if in_background:
            self._rank = with_own_control(rank, config.parallel.control_timeout_s)
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._running: Future[None] | None = None

    def write(self, write: Callable[[Rank], Path], *, in_background: bool) -> None:
        """Writes the checkpoint, here or in the thread. Collective.

        Raises the errors of `start_checkpoint`; those of the thread are raised by `finish`.
        """
        if in_background:
            self._running = self._threads.submit(self._write, write)
        else:
            self._write(write)

    def finish(self) -> None:
        """Waits for the thread and raises its error, a CheckpointError on all ranks."""
        running = self._running
        self._running = None
        if running is not None:
            with report_wait("for the files of the last checkpoint"):
                running.result()

    def close(self) -> None:
        """Waits for the thread; logs its error, because the run ends."""
        try:
            self.finish()
        except (PacsError, RuntimeError) as error:
            logger.warning("the last checkpoint was not written: %s", error)

    def _write(self, write: Callable[[Rank], Path]) -> None:
        folder = write(self._rank)
        if self._rank.rank == 0:
            logger.info("saved %s", folder)
