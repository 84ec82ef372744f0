"""Reads and writes large files once, and drops used pages from the page cache.

Otherwise a conversion fills the cache with pages that are not read again. Their allocation costs
CPU time, and the kernel drops the cached files of other programs.
"""

import mmap
import os
import threading
from collections import deque
from pathlib import Path


class MappedFile:
    """A file mapped copy-on-write.

    Tensors over it are writable, and writes do not change the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def prefetch(self, start: int, nbytes: int) -> None:
        """Starts reading the whole range; page faults would read it in small pieces."""
        first = _page_of(start)
        self.map.madvise(mmap.MADV_WILLNEED, first, start + nbytes - first)

    def release(self, start: int, nbytes: int) -> None:
        """Drops the range from memory.

        The next use reads it again; values written to a view of it are lost.
        """
        first = _page_of(start)
        length = start + nbytes - first
        self.map.madvise(mmap.MADV_DONTNEED, first, length)
        # After madvise, because the cache keeps mapped pages.
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, first, length, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class WriteBehind:
    """Starts writing data to disk as soon as it is in the cache, and drops it from the cache later.

    Safe from any thread. The caller closes the descriptors after the last `wrote`.
    """

    _DELAY_BYTES = 256 << 20

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int, int]] = deque()
        """descriptor, start and bytes of the last ranges, about `_DELAY_BYTES` together"""
        self._waiting_bytes = 0
        self._mutex = threading.Lock()

    def wrote(self, descriptor: int, start: int, nbytes: int) -> None:
        """Records that bytes [start, start + nbytes) of the file were written."""
        # On this advice Linux starts the write-back of dirty pages and drops only clean ones.
        os.posix_fadvise(descriptor, start, nbytes, os.POSIX_FADV_DONTNEED)

        # Ranges written long ago are clean by now, so the same advice drops them.
        old_ranges = []
        with self._mutex:
            self._waiting.append((descriptor, start, nbytes))
            self._waiting_bytes += nbytes
            while self._waiting_bytes > self._DELAY_BYTES and len(self._waiting) > 1:
                old_range = self._waiting.popleft()
                self._waiting_bytes -= old_range[2]
                old_ranges.append(old_range)
        for old_descriptor, old_start, old_nbytes in old_ranges:
            os.posix_fadvise(old_descriptor, old_start, old_nbytes, os.POSIX_FADV_DONTNEED)


def _page_of(position: int) -> int:
    """The start of the page with this byte."""
    return position // mmap.PAGESIZE * mmap.PAGESIZE
