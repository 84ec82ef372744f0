"""Parent process of one SGLang server: ends it and all its children when the launcher ends.

SGLang orphans its scheduler when it is killed. If the guard is killed too, the next start cleans up
by the pid file (`server.reap`).

`python -I guard.py <pid file> <grace seconds> <store file> <command> ...`, with a pipe from the
launcher as standard input. When the pipe closes, the launcher ends, SIGTERM arrives or the server
exits, the guard

- ends the process group and all descendants,
- removes the pid file, the store file (rendezvous of the server's ranks) and leftover shared
  memory,
- exits with the server's exit status (128 + signal).
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from pacs_megatron.runtime.processes import die_with_parent, start_ticks, stat_fields

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.2
SHARED = "/dev/shm/"  # noqa: S108
SHARED_FAMILIES = (
    "sglang_",
    "sgl_shm_",
    "multi_tokenizer_args_",
    "sem.mp-",
    "psm_",
    "nccl-",
    "cuda.shm.",
)
"""Name prefixes of shared memory that a killed server and its libraries leave behind; the trainer
uses others.
"""
SCAN_S = 10.0
"""Interval in which the guard records the shared memory of its server."""


def members(group: int, ancestor: int | None = None) -> list[int]:
    """Live processes of the process group, and all descendants of `ancestor`."""
    parent_of: dict[int, int] = {}
    ours: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        pid = int(entry)
        fields = stat_fields(pid)
        if fields is None:
            continue
        _, parent, process_group, *_ = fields
        parent_of[pid] = int(parent)
        if int(process_group) == group:
            ours.add(pid)

    generation = set() if ancestor is None else {ancestor}
    while generation:
        generation = {
            pid for pid, parent in parent_of.items() if parent in generation and pid not in ours
        }
        ours |= generation
    return sorted(ours - {os.getpid()})


def shared_inodes(pids: list[int]) -> set[int]:
    """Inodes of the shared-memory files that these processes have mapped.

    Inodes and not names, because glibc maps a semaphore before it names it.
    """
    inodes: set[int] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # the process ended
            continue
        for line in maps.splitlines():
            # address, permissions, offset, device, inode, path
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(SHARED):
                inodes.add(int(fields[4]))
    return inodes


def remove_shared(inodes: set[int]) -> None:
    """Unlinks the files of these inodes whose name starts with one of SHARED_FAMILIES.

    tmpfs does not reuse inodes.
    """
    with contextlib.suppress(OSError), os.scandir(SHARED) as entries:
        for entry in entries:
            if entry.name.startswith(SHARED_FAMILIES) and entry.inode() in inodes:
                Path(entry.path).unlink(missing_ok=True)


def end_all(server: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ends the server's group and all descendants: SIGTERM, and SIGKILL after `grace_s`.

    Returns when all ended, or 10 s after SIGKILL.
    """
    group = server.pid
    guard = os.getpid()
    for signal_number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + wait_s
        for pid in members(group, guard):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
                os.kill(pid, signal.SIGCONT)  # a stopped process handles SIGKILL only
        while time.monotonic() < deadline:
            reap_orphans(server)
            if not members(group, guard):
                return
            time.sleep(0.05)


def reap_orphans(server: subprocess.Popen[bytes]) -> None:
    """Reaps finished children (the guard adopts orphans), so that no zombies remain."""
    with contextlib.suppress(ChildProcessError):
        while True:
            # WNOWAIT leaves the child, so that the server's status reaches its Popen object.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            if ended.si_pid == server.pid:
                server.wait()
            else:
                os.waitpid(ended.si_pid, 0)


def write_pid_file(path: Path, server: int, store: Path, shared: set[int]) -> None:
    """Writes what `server.reap` needs after this guard was killed: processes, files, inodes."""
    record = {
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "guard": os.getpid(),
        "guard_start": start_ticks(os.getpid()),
        "server": server,
        "server_start": start_ticks(server),
        "store": str(store),
        "shared": sorted(shared),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    partial.replace(path)


def main(argv: list[str]) -> int:
    pid_file = Path(argv[1])
    grace_s = float(argv[2])
    store = Path(argv[3])
    command = argv[4:]
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    stop_requests = []
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, lambda *_: stop_requests.append(True))

    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
    )
    shared: set[int] = set()
    write_pid_file(pid_file, server.pid, store, shared)
    scan_at = time.monotonic() + SCAN_S
    # A forked sibling of the launcher may keep the pipe open. A changed parent pid shows that the
    # launcher ended.
    while not stop_requests and server.poll() is None and os.getppid() == launcher:
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            break
        if time.monotonic() > scan_at:
            scan_at = time.monotonic() + SCAN_S
            recorded = shared
            shared = recorded | shared_inodes(members(server.pid, os.getpid()))
            if shared != recorded:
                write_pid_file(pid_file, server.pid, store, shared)

    shared |= shared_inodes(members(server.pid, os.getpid()))
    end_all(server, grace_s)
    remove_shared(shared)
    store.unlink(missing_ok=True)
    pid_file.unlink(missing_ok=True)
    status = server.wait()
    return status if status >= 0 else 128 - status  # the shell's convention: 137 for SIGKILL


if __name__ == "__main__":
    sys.exit(main(sys.argv))
