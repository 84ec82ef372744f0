"""A full disk, or one that is read-only, for all processes of a command: file system calls below a
folder fail.
"""

from __future__ import annotations

import errno
import mmap
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SOURCE = Path(__file__).with_name("fault_fs.c")
_HEAD = struct.Struct("<qqqq4096s")
_LOG_BYTES = 1 << 20


class FaultyDisk:
    """Counts the calls below `folder` that need space (`write`, `create`, `mkdir`, `rename`,
    `fsync`) and fails them.

    Programs see it if they start with `environ`. stdio of C is not covered: libc writes its buffers
    without a symbol.
    """

    def __init__(self, work: Path, folder: Path) -> None:
        work.mkdir(exist_ok=True)
        library = work / "fault_fs.so"
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"], check=True
        )
        file = work / "state"
        file.write_bytes(bytes(_HEAD.size + _LOG_BYTES + 8))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), 0)
        self._folder = str(folder)
        self.environ: Mapping[str, str] = {"LD_PRELOAD": str(library), "FAULT_FS_STATE": str(file)}
        self.fail(0)

    def fail(
        self, first: int, *, last: int = 0, error: int = errno.ENOSPC, folder: Path | None = None
    ) -> None:
        """Starts to count at 1; calls from number `first` to `last` fail (0: none, and all later
        ones).

        `folder`: another one than the constructor's.
        """
        self._map[:] = bytes(len(self._map))
        _HEAD.pack_into(self._map, 0, 0, first, error, last, str(folder or self._folder).encode())

    def calls(self) -> list[str]:
        """`<call> <path in the folder>`, in order."""
        (used,) = struct.unpack_from("<q", self._map, _HEAD.size + _LOG_BYTES)
        text = self._map[_HEAD.size : _HEAD.size + used].decode(errors="replace")
        return [line.replace("/", "", 1) for line in text.splitlines()]
