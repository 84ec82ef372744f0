"""Ensures one writer per run folder with an flock on `<run>/run.lock`, and with a lease in the file
with a heartbeat.

On some file systems (Lustre without `-o flock`, NFS with `local_lock`) an flock does not reach
other hosts, so the lease is needed too. Readers take no lock. Libraries such as filelock have only
one of the two.
"""

import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from pacs_megatron.errors import ConfigError, DataError, ExitCode
from pacs_megatron.runtime.closing import Closing
from pacs_megatron.runtime.files import naming
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.processes import start_ticks
from pacs_megatron.runtime.waiting import report_wait

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_MAX_LEASE_BYTES = 1 << 16
_HEARTBEAT_S = 5.0
_STALE_S = 20.0
"""Seconds without a heartbeat after which another host's lease is stale"""
_CERTAINLY_STALE_S = 900.0
"""Age of the file, larger than any difference between clocks of hosts, above which a lease is stale
at once
"""


class FolderInUseError(ConfigError):
    """Another live process writes to the run folder."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The writer of a run folder, as recorded in the lock file."""

    command: str
    host: str
    namespace: str
    """of process ids: containers of one host may share its name"""
    pid: int
    started: str
    """start time of the process in the kernel's clock ticks; distinguishes a reused pid"""
    since: str
    """local time at which the lock was taken, for messages"""
    token: str
    heartbeat: int = 0

    def __str__(self) -> str:
        return f"`{self.command}` (pid {self.pid} on {self.host}, since {self.since})"


class RunLock(Closing):
    """Creates `run_dir` and holds its lock until `close`; takes over a dead process's lock.

    Raises FolderInUseError.
    """

    def __init__(self, run_dir: Path, command: str) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / LOCK_FILE
        self._folder = run_dir.stat()
        self._file = _open(self._path)
        try:
            self._acquire(run_dir, command)
        except BaseException:
            os.close(self._file)
            raise

        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="run lock", daemon=True)
        self._thread.start()

    def _acquire(self, run_dir: Path, command: str) -> None:
        has_flock = _flock(self._file, run_dir)
        before = _read(self._path)
        if before is not None:
            if _is_alive(self._path, before):
                raise _in_use(run_dir, before)
            logger.warning(
                "%s: lock of %s taken over: that process ended without releasing it",
                run_dir,
                before,
            )

        self._lease = _own_lease(command)
        self._write()
        if not has_flock:
            # Two processes may find the same stale lease; the one that wrote last keeps the lock.
            time.sleep(1.0)
            lease = _read(self._path)
            if lease is not None and lease.token != self._lease.token:
                raise _in_use(run_dir, lease)

    def _write(self) -> None:
        data = json.dumps(asdict(self._lease)).encode()
        # In place: a renamed file would be another inode, which the flock does not cover.
        with naming(self._path):
            os.pwrite(self._file, data, 0)
            os.ftruncate(self._file, len(data))

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(_HEARTBEAT_S):
            try:
                self._check_lock()
                self._lease = replace(self._lease, heartbeat=self._lease.heartbeat + 1)
                self._write()
            except ConfigError as error:
                # An exception would end this thread only, and the run would go on writing.
                sys.stderr.write(
                    f"{type(error).__name__}: {error}; this process exits without a save\n"
                )
                sys.stderr.flush()
                os._exit(int(ExitCode.FAILED))
            except OSError as error:
                # A full disk or a busy file server: the next heartbeat may succeed.
                logger.warning("%s: heartbeat not written: %s", self._path, error)

    def _check_lock(self) -> None:
        """Restores a removed lock file.

        Raises:
            FolderInUseError: Another process has taken the folder over.
            ConfigError: The folder was removed or replaced.
        """
        folder = self._path.parent
        lease = _read(self._path)
        if lease is not None and lease.token != self._lease.token:
            raise FolderInUseError(
                f"{folder}: {lease} took this folder over while this process was stopped"
            )
        if lease is not None:
            return

        if not folder.exists() or not os.path.samestat(folder.stat(), self._folder):
            raise ConfigError(
                f"{folder} was removed, renamed or replaced while this process used it"
            )
        if self._path.exists():
            return

        # Opened before the old descriptor is closed: after a failure, the next heartbeat would
        # write to the closed number, which may belong to another file by then.
        before = self._file
        self._file = _open(self._path)
        os.close(before)
        _flock(self._file, folder)
        logger.warning("%s was removed while this process holds it; written again", self._path)

    def close(self) -> None:
        """Releases the lock. The empty file stays: removing it would race with the next writer."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        os.ftruncate(self._file, 0)
        os.close(self._file)


def _open(path: Path) -> int:
    # The lease is written in place: never through a link into another file.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def lock_owner(run_dir: Path) -> Lease | None:
    """The live writer of `run_dir`, or None.

    Takes no lock and writes nothing; may wait up to 20 s, with a log line.
    """
    path = run_dir / LOCK_FILE
    lease = _read(path)
    if lease is None or not _is_alive(path, lease):
        return None
    return lease


def last_lease(run_dir: Path) -> tuple[Lease, bool] | None:
    """The lease in `run_dir` and whether its writer is alive; None if it was released.

    Does not wait: a writer on another host counts as alive if the age of the file is that of a
    heartbeat.
    """
    path = run_dir / LOCK_FILE
    lease = _read(path)
    if lease is None:
        return None
    if _is_here(lease):
        return lease, _runs_here(lease)
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None
    return lease, age_s < _STALE_S


def check_not_locked(run_dir: Path) -> None:
    """Raises FolderInUseError when a live process holds the lock of `run_dir`."""
    owner = lock_owner(run_dir)
    if owner is not None:
        raise _in_use(run_dir, owner)


def _in_use(run_dir: Path, owner: Lease | None) -> FolderInUseError:
    fix = "stop that process, choose another run.name, or another --out"
    return FolderInUseError(f"{run_dir} is in use by {owner or 'another process'}; {fix}")


def _flock(file: int, run_dir: Path) -> bool:
    """Takes the flock; returns False where the file system has none.

    Raises FolderInUseError when another process holds it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(run_dir, _read(run_dir / LOCK_FILE)) from None
    except OSError as error:
        logger.info(
            "%s: no flock here (%s); the lease alone guards the folder", run_dir, error.strerror
        )
        return False
    return True


def _read(path: Path) -> Lease | None:
    """None for a released lock; also for a torn write, whose writer has died, and for any other
    content that is not a lease.
    """
    try:
        lease = Lease(**read_object(path, max_bytes=_MAX_LEASE_BYTES))
    except (DataError, TypeError):
        return None

    for field in fields(lease):
        if type(getattr(lease, field.name)) is not field.type:
            return None
    return lease if str(lease).isprintable() else None


def _own_lease(command: str) -> Lease:
    """A new lease of this process."""
    return Lease(
        command=command,
        host=socket.gethostname(),
        namespace=_namespace(),
        pid=os.getpid(),
        started=str(start_ticks(os.getpid()) or ""),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        token=uuid.uuid4().hex,
    )


def _is_alive(path: Path, lease: Lease) -> bool:
    """Whether the process of `lease` runs: looks it up on this host, else waits for a heartbeat."""
    if _is_here(lease):
        return _runs_here(lease)

    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    if age_s > _CERTAINLY_STALE_S:
        return False

    deadline = time.monotonic() + _STALE_S
    with report_wait(f"up to {_STALE_S:.0f} s for a heartbeat of {lease} in {path.parent}"):
        while time.monotonic() < deadline:
            time.sleep(0.5)
            latest = _read(path)
            if latest is None:
                is_released = not path.is_file() or path.stat().st_size == 0
                if is_released:
                    return False
            elif (latest.token, latest.heartbeat) != (lease.token, lease.heartbeat):
                return True
    return False


def _is_here(lease: Lease) -> bool:
    return (lease.host, lease.namespace) == (socket.gethostname(), _namespace())


def _runs_here(lease: Lease) -> bool:
    ticks = start_ticks(lease.pid)
    return ticks is not None and str(ticks) == lease.started


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
