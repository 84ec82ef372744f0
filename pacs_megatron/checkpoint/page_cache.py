"""Files larger than memory, read and written once: what has been used leaves the page cache again.

Left alone, a conversion fills the cache with pages that nobody reads a second time; getting fresh pages for them costs
processor time, and other programs' files are pushed out.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from pathlib import Path


class MappedFile:
    """A file mapped copy-on-write: tensors over it are writable, and writes never reach the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def prefetch(self, start: int, nbytes: int) -> None:
        """Asks for the whole range at once: faults alone would read it in small pieces."""
        first = _page_of(start)
        self.map.madvise(mmap.MADV_WILLNEED, first, start + nbytes - first)

    def release(self, start: int, nbytes: int) -> None:
        """Drops the range from memory; the next use reads it again. What was written over a view of it is lost."""
        first = _page_of(start)
        self.map.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)
        # The cache keeps pages that are mapped, so only now.
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, first, start + nbytes - first, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class WriteBehind:
    """Starts the writing of what was put into a file, and drops it from the cache a while later, when it is on disk.

    Safe from any thread. The descriptors stay open until the caller closes them, after the last `wrote`.
    """

    _DELAY_BYTES = 256 << 20

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._waiting_bytes = 0
        self._mutex = threading.Lock()

    def wrote(self, descriptor: int, start: int, nbytes: int) -> None:
        """Tells that bytes [start, start + nbytes) of the file have just been written."""
        # Linux starts the write-back of dirty pages that it is advised to drop, and drops the clean ones only.
        os.posix_fadvise(descriptor, start, nbytes, os.POSIX_FADV_DONTNEED)
        done = []
        with self._mutex:
            self._waiting.append((descriptor, start, nbytes))
            self._waiting_bytes += nbytes
            while self._waiting_bytes > self._DELAY_BYTES and len(self._waiting) > 1:
                done.append(self._waiting.popleft())
                self._waiting_bytes -= done[-1][2]
        for one in done:
            os.posix_fadvise(*one, os.POSIX_FADV_DONTNEED)


def _page_of(position: int) -> int:
    return position // mmap.PAGESIZE * mmap.PAGESIZE
