"""Reports a wait that takes long, from a thread: the waiting thread may be inside a C++ call."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)
NOTICE_S = 10.0


@contextlib.contextmanager
def report_wait(reason: str) -> Iterator[None]:
    """Logs `reason` after 10 s in the block, and every 10 s after that."""
    start, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(NOTICE_S):
            logger.warning("waiting %s: %.0f s", reason, time.monotonic() - start)

    thread = threading.Thread(target=report, name="report wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
