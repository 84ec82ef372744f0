"""Writes folders under a temporary name and renames them, so a folder with its final name is
complete.
"""

import fcntl
import logging
import shutil
import uuid
from pathlib import Path
from typing import IO, Self

from pacs_megatron.errors import CheckpointError
from pacs_megatron.runtime.files import sync_path

logger = logging.getLogger(__name__)

_LOCK = ".writing"


class StagedFolder:
    """A temporary folder `<target>.partial-*`; `commit` renames it to `target`, `abort` removes it.

    The next writer of the same target removes the folders of killed writers. A folder of a live
    writer is locked and stays.
    """

    def __init__(self, target: Path) -> None:
        """Creates the temporary folder. Raises CheckpointError if `target` exists."""
        if target.exists():
            raise CheckpointError(
                f"{target} exists already; delete it or choose another output folder"
            )
        self.target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        self.path = target.with_name(f"{target.name}.partial-{uuid.uuid4().hex[:8]}")
        self.path.mkdir()
        self._lock = _acquire(self.path / _LOCK)

    def commit(self) -> Path:
        """Flushes the folder to disk, renames it and returns its path."""
        (self.path / _LOCK).unlink()
        folders = [path for path in self.path.rglob("*") if path.is_dir()]
        for folder in (*folders, self.path):
            sync_path(folder)
        if self.target.exists():
            self.abort()
            raise CheckpointError(
                f"{self.target} appeared while it was being written; the new copy was discarded"
            )
        self.path.rename(self.target)
        sync_path(self.target.parent)
        self._lock.close()
        return self.target

    def abort(self) -> None:
        """Removes the temporary folder; does nothing after `commit`."""
        if self.path.exists():
            shutil.rmtree(self.path)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()


def remove_leftovers(target: Path) -> None:
    """Removes `<target>.partial-*` folders whose writer has ended."""
    for folder in sorted(target.parent.glob(f"{target.name}.partial-*")):
        lock_file = folder / _LOCK
        if folder.is_symlink() or not folder.is_dir():
            continue  # no writer makes these
        try:
            lock = _acquire(lock_file)
        except BlockingIOError:
            logger.warning("another process is writing %s; not removed", folder)
            continue
        shutil.rmtree(folder)
        lock.close()
        logger.info("removed %s of an interrupted process", folder)


def check_free_disk(target: Path, needed_bytes: int) -> None:
    """Raises CheckpointError if the file system of `target` has too little free space."""
    existing = target.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    # For headers, indices and metadata of the file system.
    margin = needed_bytes // 100 + (16 << 20)
    needed = needed_bytes + margin
    if free < needed:
        raise CheckpointError(
            f"{target} needs {needed / 1e9:.2f} GB and {existing} has {free / 1e9:.2f} GB free; "
            "free some or choose an output folder on another disk"
        )


def _acquire(path: Path) -> IO[bytes]:
    """Locks the file at `path` and returns it.

    Raises BlockingIOError if another process has the lock.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    return file
